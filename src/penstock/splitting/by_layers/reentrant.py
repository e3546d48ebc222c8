"""Reentrant activation checkpointing, which has no graph between stages and is refused."""

import sys
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction

from penstock.errors import ModelError

__all__ = ["is_in_reentrant_checkpoint", "refuse_reentrant"]


def is_in_reentrant_checkpoint() -> bool:
    """Return whether `checkpoint(..., use_reentrant=True)` runs the caller, without gradients.

    Torch has no function for this, so the stack of calls is searched.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


def refuse_reentrant(path: str) -> ModelError:
    """Return the error for a module whose gradients would be lost in such a checkpoint."""
    return ModelError(
        f"{path!r} is called by a checkpoint with use_reentrant=True, which sends no gradients to "
        "other stages; checkpoint with use_reentrant=False"
    )
