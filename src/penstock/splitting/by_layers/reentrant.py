"""Finds out whether a module is called by a checkpoint of the old kind."""

import sys
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction

__all__ = ["is_in_reentrant_checkpoint"]


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
