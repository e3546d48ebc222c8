"""One run of Lightning's Trainer or of Fabric: python run.py WHAT FOLDER [name=value ...].

WHAT is "trainer" for the library alone, or the schedule of a pipeline; FABRIC comes before it as
in "fabric:ZBV". The first process writes the losses to FOLDER/logs.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from tests.integrations.hugging_face.run import make_model, mask_some
from tests.integrations.rows import Rows

BATCH = 4


def make_data(*, is_full: bool) -> tuple[list[Any], list[Any]]:
    rows = torch.randint(3, 64, (44, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row if is_full else mask_some(row)} for row in rows]
    return data[:32], data[32:]


class Language(LightningModule):
    def __init__(self, *, tied: bool, is_plain: bool) -> None:
        super().__init__()
        self.model = make_model(tied=tied)
        self.words = SumMetric()
        self.mean = MeanMetric()
        self.losses: list[Any] = []
        self.is_plain = is_plain

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(["loss", float(self.trainer.strategy.reduce(loss.detach()))])
        if self.is_plain:
            return loss
        # Gradients follow what is made of the loss; each replica makes it of its own.
        return {"loss": loss * 0.5 + 0.25 * loss.square(), "number": number}

    def validation_step(self, batch: Any) -> None:
        loss = self.model(**batch).loss
        self.mean(loss)
        self.words(batch["input_ids"].sum())
        self.log("held", loss, sync_dist=True)
        self.log("words", self.words)
        self.log("mean", self.mean)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        found = self.trainer.callback_metrics
        self.losses.append(["words", float(self.words.compute())])
        self.losses.append(["mean", float(self.mean.compute())])
        self.losses += [["held", float(found["held"])]] if "held" in found else []

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def train(what: str, folder: Path, chosen: dict[str, str]) -> None:
    seed_everything(3, verbose=False)
    is_full = chosen.pop("full", "") == "yes"
    module = Language(tied=chosen.pop("tied", "") == "yes", is_plain=is_full)
    shuffle = chosen.pop("shuffle", "") == "yes"
    data, held = make_data(is_full=is_full)
    batch = int(chosen.pop("batch", BATCH))
    settings: dict[str, Any] = {"devices": 1}
    place: dict[str, Any] = {"num_replicas": 1, "rank": 0}
    if what != "trainer":
        from penstock.integrations.lightning import PipelineConfig, PipelineStrategy

        ranks = int(chosen.pop("ranks", 0)) or None
        strategy = PipelineStrategy(PipelineConfig(what, microbatches=4, ranks=ranks))
        world = int(os.environ["WORLD_SIZE"])
        settings = {"strategy": strategy, "devices": world}
        if ranks is not None:
            # Lightning's own sampler would shuffle.
            settings["use_distributed_sampler"] = False
            place = {"num_replicas": world // ranks, "rank": int(os.environ["RANK"]) // ranks}
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=int(chosen.pop("epochs", 5)),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        precision=chosen.pop("precision", "32-true"),  # type: ignore[arg-type]  # one of theirs
        callbacks=[ModelCheckpoint(folder / "saved", "{epoch}", save_top_k=-1)],
        **settings,
    )
    loaders: list[Any] = []
    for rows in (Rows(data), Rows(held)):
        sampler: Any = DistributedSampler(rows, shuffle=False, **place)
        loaders.append(DataLoader(rows, batch, sampler=sampler))
    if shuffle:
        loaders[0] = DataLoader(Rows(data), batch, shuffle=True)
    trainer.fit(module, loaders[0], loaders[1], ckpt_path=chosen.pop("resume", None))
    assert not chosen, chosen
    if what == "trainer":
        module.model.save_pretrained(folder / "final")
    else:
        from penstock.integrations.pretrained import save_pretrained

        pipelines: Any = trainer.strategy
        writes = pipelines.layout.replica == 0
        save_pretrained(pipelines.pipeline, folder / "final", model=module.model, is_writer=writes)
    if trainer.is_global_zero:
        (folder / "logs.json").write_text(json.dumps(module.losses))


def main(what: str, folder: Path, *settings: str) -> None:
    warnings.simplefilter("ignore")
    train(what, folder, dict(setting.split("=", 1) for setting in settings))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
