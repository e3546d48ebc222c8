"""Modules whose result depends on the other rows of a batch, which microbatches do not have."""

from collections.abc import Iterable
from functools import cache
from logging import getLogger

from torch import nn

__all__ = ["explain_once", "log_batch_statistics"]

_LOGGER = getLogger(__name__)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def log_batch_statistics(modules: Iterable[nn.Module], microbatches: int) -> None:
    """Log that a batch norm in training mode takes its statistics from each microbatch.

    Once in a process. This is not a `Warning`: every pipeline does so, and evaluation is not
    affected.
    """
    held = [module for stage in modules for module in stage.modules()]
    if microbatches > 1 and any(isinstance(module, _BATCH_NORMS) for module in held):
        explain_once()


@cache
def explain_once() -> None:
    """Log it, at the first call only."""
    _LOGGER.warning(
        "in training mode a batch norm takes its mean and variance from each microbatch, so that "
        "losses and gradients differ from the unsplit model's, as with smaller batches; to avoid "
        "that, set such modules to eval(), or use norms that see one row at a time"
    )
