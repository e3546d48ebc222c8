"""Finds out whether a module is called by a checkpoint of the old kind."""

import sys
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction

from penstock.errors import ModelError

__all__ = ["is_in_reentrant_checkpoint", "refuse_reentrant"]


def is_in_reentrant_checkpoint() -> bool:
    """Whether `checkpoint(..., use_reentrant=True)` runs the caller, without gradients.

    Torch does not tell, so that the calls that lead here are looked through.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


def refuse_reentrant(path: str) -> ModelError:
    """The error for a module whose gradients would be lost in such a checkpoint."""
    return ModelError(
        f"{path!r} is called by a checkpoint with use_reentrant=True, from which no gradient "
        "comes back to another stage; checkpoint with use_reentrant=False"
    )
