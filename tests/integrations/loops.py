"""One loop with Fabric or an Accelerator: python loops.py LIBRARY WHAT FOLDER [name=value ...].

WHAT is "plain" for the library alone, or the schedule of a pipeline. The first process writes the
losses to FOLDER/logs.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from penstock.integrations.pretrained import save_pretrained
from tests.integrations.hugging_face.run import make_model, mask_some
from tests.integrations.rows import Rows

BATCH, ACCUMULATED, STEPS, KEPT = 4, 2, 20, 12


def make_data() -> tuple[list[Any], list[Any]]:
    rows = torch.randint(3, 64, (92, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": mask_some(row)} for row in rows]
    return data[:80], data[80:]


class FabricLoop:
    def __init__(self, what: str, ranks: int | None) -> None:
        from lightning import Fabric

        settings: dict[str, Any] = {"devices": 1}
        if what != "plain":
            from penstock.integrations.lightning import PipelineConfig, PipelineFabricStrategy

            strategy = PipelineFabricStrategy(
                PipelineConfig(what, microbatches=4, ranks=ranks), share_outputs=True
            )
            settings = {"strategy": strategy, "devices": int(os.environ["WORLD_SIZE"])}
        self.fabric: Any = Fabric(accelerator="cpu", **settings)
        self.fabric.launch()

    def prepare(self, model: Any, optimizer: Any, loader: Any, held: Any) -> Any:
        model, optimizer = self.fabric.setup(model, optimizer)
        return model, optimizer, *self.fabric.setup_dataloaders(loader, held)

    def step(self, number: int, loss: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.fabric.backward(loss / ACCUMULATED)
        if number % ACCUMULATED == ACCUMULATED - 1:
            self.fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def around(self, model: Any) -> Any:
        return self.fabric.no_backward_sync(model, enabled=False)

    def save(self, folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.fabric.save(
            folder / "state", {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        )

    def load(self, folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        assert self.fabric.load(folder / "state", state) == {}

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.fabric.all_gather(tensor)
        return found.reshape(-1, *tensor.shape[1:])

    def export(self, folder: Path, whole: Any) -> None:
        save_pretrained(self.fabric.strategy.pipeline, folder, model=whole)

    @property
    def is_first(self) -> bool:
        return bool(self.fabric.is_global_zero)


class AcceleratorLoop:
    def __init__(self, what: str, ranks: int | None) -> None:
        given: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": ACCUMULATED}
        if what == "plain":
            from accelerate import Accelerator

            self.accelerator: Any = Accelerator(**given)
        else:
            from penstock.integrations.hugging_face import PipelineAccelerator, PipelineConfig

            config = PipelineConfig(what, microbatches=4, ranks=ranks)
            self.accelerator = PipelineAccelerator(pipeline=config, share_outputs=True, **given)

    def prepare(self, *objects: Any) -> Any:
        return self.accelerator.prepare(*objects)

    def step(self, number: int, loss: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        del number
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if self.accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()

    def around(self, model: Any) -> Any:
        return self.accelerator.accumulate(model)

    def save(self, folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
        del model, optimizer
        self.accelerator.register_for_checkpointing(scheduler)
        self.accelerator.save_state(str(folder / "state"))

    def load(self, folder: Path, model: Any, optimizer: Any, scheduler: Any) -> None:
        del model, optimizer
        self.accelerator.register_for_checkpointing(scheduler)
        self.accelerator.load_state(str(folder / "state"))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.accelerator.gather_for_metrics(tensor)
        return found

    def export(self, folder: Path, whole: Any) -> None:
        self.accelerator.save_model(whole, str(folder))

    @property
    def is_first(self) -> bool:
        return bool(self.accelerator.is_main_process)


LOOPS: dict[str, Any] = {"fabric": FabricLoop, "accelerate": AcceleratorLoop}


def main(library: str, what: str, folder: Path, *settings: str) -> None:
    warnings.simplefilter("ignore")
    chosen = dict(setting.split("=") for setting in settings)
    torch.manual_seed(3)
    whole = make_model(tied=chosen.pop("tied", "") == "yes")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
    loop = LOOPS[library](what, int(chosen.pop("ranks", 0)) or None)
    data, held = make_data()
    loaders: tuple[Any, Any] = (
        DataLoader(Rows(data), BATCH, shuffle=True),
        DataLoader(Rows(held), 5),
    )
    model, optimizer, loader, held_loader = loop.prepare(whole, optimizer, *loaders)
    start = 0
    if "resume" in chosen:
        loop.load(Path(chosen.pop("resume")), model, optimizer, scheduler)
        start = KEPT
    logs: list[Any] = []
    torch.manual_seed(5)
    batches = [batch for _ in range(STEPS * ACCUMULATED * BATCH // len(data)) for batch in loader]
    for number, batch in enumerate(batches):
        if number < start * ACCUMULATED:
            continue
        model.train()
        with loop.around(model):
            loss = model(**batch).loss
            loop.step(number, loss, model, optimizer, scheduler)
        logs.append(["loss", float(loss)])
        if number % 8 == 7:
            logs += evaluate(loop, model, held_loader)
        if number == KEPT * ACCUMULATED - 1:
            loop.save(folder, model, optimizer, scheduler)
    assert not chosen, chosen
    if what == "plain":
        whole.save_pretrained(folder / "final")
    else:
        loop.export(folder / "final", whole)
    if loop.is_first:
        (folder / "logs.json").write_text(json.dumps(logs))
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def evaluate(loop: Any, model: Any, loader: Any) -> list[Any]:
    model.eval()
    logs, hits = [], 0
    for batch in loader:
        output = model(**batch)
        logs.append(["held", float(output.loss)])
        guesses = loop.gather(output.logits.argmax(-1)[:, :-1])
        labels = loop.gather(batch["labels"][:, 1:])
        hits += int((guesses == labels).sum())
    return [*logs, ["hits", hits]]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
