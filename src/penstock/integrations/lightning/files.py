"""Checkpoints of Lightning as folders that any layout can resume from.

epoch=3.ckpt/trainer.ckpt   what Lightning keeps: loops, callbacks, schedulers
             pipeline/      weights and optimizer, every process its own part
"""

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.integrations.parts import replace_folder, save_parts, start_folder
from penstock.training.pipeline import Pipeline

__all__ = ["find_parts", "save"]

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
