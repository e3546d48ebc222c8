"""Losses added inside a stage, which count as parts of the loss of the whole model."""

from contextvars import ContextVar

import torch

from penstock.errors import PipelineError
from penstock.loss.contract import require_number

__all__ = ["add_loss", "begin_collecting", "collect_losses", "end_collecting"]

_current: ContextVar[list[torch.Tensor] | None] = ContextVar("penstock_losses", default=None)


# Collect in a list what `add_loss` is called with in this thread, until the end; `collect_losses`
# does both, but takes longer.
begin_collecting, end_collecting = _current.set, _current.reset


def add_loss(loss: torch.Tensor) -> None:
    """Add an auxiliary loss from inside a stage's forward: one number, a mean over the rows seen.

    Its weight is the microbatch's share of the batch, so that its gradient is that of the mean
    over the whole batch. Outside a training step, and while a checkpoint recomputes, this does
    nothing. Call it in the thread that runs the forward.
    """
    collected = _current.get()
    if collected is None:
        return
    number = require_number(loss, "an added loss")
    if not torch.is_grad_enabled():
        raise PipelineError(
            "a loss must be added where gradients are recorded, or it has no effect (got one "
            "under no_grad, or in a checkpoint with use_reentrant=True); add it outside, or set "
            "use_reentrant=False"
        )
    collected.append(number)


class collect_losses:  # noqa: N801  # a context manager, written for speed
    """Collect what `add_loss` is called with meanwhile, in this thread."""

    __slots__ = ("_token",)

    def __enter__(self) -> list[torch.Tensor]:
        collected: list[torch.Tensor] = []
        self._token = _current.set(collected)
        return collected

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
