"""Checkpoints: saved by any layout in the background, loaded by any other."""

from penstock.checkpoint.checkpoints import Checkpoints, Restored

__all__ = [
    "Checkpoints",
    "Restored",
]
