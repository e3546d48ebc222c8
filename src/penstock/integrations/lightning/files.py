"""Checkpoints of Lightning as folders that any layout can resume from.

epoch=3.ckpt/trainer.ckpt   what Lightning keeps: loops, callbacks, schedulers
             pipeline/      weights and optimizer, every process its own part
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.integrations.parts import replace_folder, save_parts, start_folder
from penstock.training.pipeline import Pipeline

__all__ = ["find_parts", "load_whole_optimizer", "save"]

_PARTS = "pipeline"
_REST = "trainer.ckpt"


def save(
    folder: Path,
    step: int,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    write_rest: Callable[[Path], None],
    *,
    is_first: bool,
) -> None:
    """Save everything; every process calls this, and the first one writes what is not split."""
    partial = start_folder(folder, is_first=is_first)
    if is_first:
        write_rest(partial / _REST)
    save_parts(partial / _PARTS, step, pipeline, optimizer, is_first=is_first)
    replace_folder(partial, folder, is_first=is_first)


def find_parts(path: Path) -> tuple[Path, Path] | None:
    """Return the parts and the rest of a checkpoint that was saved here, or None."""
    return (path / _PARTS, path / _REST) if (path / _PARTS).is_dir() else None


def load_whole_optimizer(
    optimizer: torch.optim.Optimizer, places: list[list[int]], state: Mapping[str, Any]
) -> None:
    """Load the state of an optimizer of the whole model, as one process saves it.

    `places` has the numbers, in the optimizer of the whole model, of the parameters in each group.
    """
    numbers = [number for group in places for number in group]
    groups, first = [], 0
    for kept, group in zip(places, state["param_groups"], strict=True):
        groups.append({**group, "params": list(range(first, first + len(kept)))})
        first += len(kept)
    found = {own: state["state"][n] for own, n in enumerate(numbers) if n in state["state"]}
    optimizer.load_state_dict({"state": found, "param_groups": groups})
