"""torchtitan's own Trainer on processors: what it logs, and the weights that it trains.

python [-m penstock.dropin] -m torch.distributed.run ... titan_trainer.py FOLDER name=NAME
[schedule=SCHEDULE]. FOLDER gets a tokenizer and a text if it has none. Rank 0 writes logs and
weights to FOLDER/NAME.pt, and prints the module of the schedule. Without one no model is split.

The trainer knows accelerators only, so that the processor is made to look like one.
"""

import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.tools import utils


class Processor:
    """What the trainer asks of an accelerator."""

    @staticmethod
    def set_device(device: torch.device) -> None: ...
    @staticmethod
    def synchronize() -> None: ...
    @staticmethod
    def empty_cache() -> None: ...
    @staticmethod
    def reset_peak_memory_stats() -> None: ...
    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: torch.device) -> str:
        return str(device)

    @staticmethod
    def get_device_properties(device: torch.device) -> Any:
        del device
        return SimpleNamespace(total_memory=2**30)

    @staticmethod
    def memory_stats(device: torch.device) -> dict[str, int]:
        del device
        return {}


# Before anything else of the library is imported, which takes these names.
vars(utils).update(device_type="cpu", device_module=Processor)

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

STEPS = 6


def write_text(folder: Path) -> None:
    """Make a tokenizer of single letters, and some lines."""
    letters = {chr(97 + number): number for number in range(26)} | {"<s>": 26, "</s>": 27}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    draws = torch.Generator().manual_seed(0)
    (folder / "text").mkdir()
    with (folder / "text" / "lines.jsonl").open("w") as file:
        for _ in range(200):
            line = "".join(map(chr, 97 + torch.randint(26, (40,), generator=draws)))
            file.write(json.dumps({"text": line}) + "\n")


def make_config(folder: Path, schedule: str | None) -> Any:
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:
        # Flexible attention has no backward on processors.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = str(folder / "tokenizer")
    config.dump_folder = str(folder / "outputs")
    text = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(folder / "text"))
    config.dataloader = text
    config.activation_checkpoint = None
    config.training = TrainingConfig(
        local_batch_size=4,
        global_batch_size=8,
        seq_len=16,
        steps=STEPS,
        max_norm=0.5,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.parallelism = ParallelismConfig(
        pipeline_parallel_degree=2 if schedule else 1,
        pipeline_parallel_schedule=schedule or "1F1B",
        pipeline_parallel_microbatch_size=1,
    )
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.validator = Validator.Config(enable=True, freq=3, steps=2, dataloader=text)
    return config


def start_alike(parts: list[Any]) -> None:
    """Give parameters values by their names, because ranks draw other ones."""
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                drawn = torch.randn(local.shape, generator=draws) * 0.05
                local.copy_(drawn + (1 if local.dim() == 1 else 0))


def main(place: str, *settings: str) -> None:
    folder, chosen = Path(place), dict(setting.split("=") for setting in settings)
    # After the first step it asks for shorter timeouts by a name that torch 2.13 does not have.
    vars(distributed)["set_pg_timeouts"] = lambda **_: None
    schedule = chosen.get("schedule")
    if not (folder / "text").is_dir():
        write_text(folder)
    trainer = make_config(folder, schedule).build()
    start_alike(trainer.model_parts)
    logs: list[tuple[str, float]] = []
    trainer.metrics_processor.log = lambda _, loss, _most, norm, **__: logs.extend(
        [("loss", loss), ("norm", norm)]
    )
    trainer.metrics_processor.log_validation = lambda loss, **_: logs.append(("held", loss))
    trainer.train()
    weights = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for part in trainer.model_parts
        for name, p in part.named_parameters()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (logs, weights))
    if dist.get_rank() == 0:
        # Losses are known where the last stage is.
        last = trainer.pp_has_last_stage if schedule else True
        found = everyone[0 if last else -1][0]
        whole = {name: value for _, part in everyone for name, value in part.items()}
        torch.save({"logs": found, "weights": whole}, folder / f"{chosen['name']}.pt")
        kind = type(trainer.pp_schedule).__module__ if schedule else ""
        print(json.dumps({"module": kind}))  # noqa: T201  # what the test reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
