"""The parts of a checkpoint that processes write themselves, in a folder that is written over."""

import shutil
from pathlib import Path

import torch

from penstock.checkpoint.checkpoints import Checkpoints
from penstock.errors import CheckpointError
from penstock.integrations.processes import barrier
from penstock.training.pipeline import Pipeline

__all__ = ["load_parts", "replace_folder", "save_parts", "start_folder"]


def save_parts(
    folder: Path,
    step: int,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_first: bool,
) -> None:
    """Save a pipeline and its optimizer; every process calls this, and one `is_first`.

    What an earlier run has left in this folder is replaced, whatever step it is of.
    """
    partial = start_folder(folder, is_first=is_first)
    barrier()
    with Checkpoints(partial) as checkpoints:
        checkpoints.save(step, pipeline, optimizer, wait=True)
    replace_folder(partial, folder, is_first=is_first)


def load_parts(folder: Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
    """Load this process's part of what was saved, by whatever layout."""
    if Checkpoints(folder).load(pipeline, optimizer) is None:
        raise CheckpointError(f"{folder} has no complete step; give another checkpoint")


def start_folder(folder: Path, *, is_first: bool) -> Path:
    """Return the place to write to until a folder is complete, made by the first process."""
    partial = folder.with_name(f".{folder.name}.partial")
    if is_first:
        _remove(partial)
        partial.mkdir(parents=True)
    return partial


def replace_folder(partial: Path, folder: Path, *, is_first: bool) -> None:
    """Put what is complete in the place of what was there; every process calls this."""
    barrier()
    if is_first:
        _remove(folder)
        partial.rename(folder)
    barrier()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
