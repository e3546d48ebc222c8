"""One forward of a stage whose layers are watched, and whether a call in it may be deferred."""

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["CastTo", "DeferredCalls", "current_cast", "current_recording", "is_plain_place"]

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_functorch_stack = torch._C._functorch.peek_interpreter_stack
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


class DeferredCalls:
    """What the calls of one forward share: several layers often take the same input."""

    __slots__ = ("last", "last_input", "last_kept", "last_matrix", "products", "watched")

    def __init__(self, watched: set[nn.Parameter], products: set[torch.Tensor]) -> None:
        # Weights that were given to a function of torch, and those of them that made a product.
        self.watched = watched
        self.products = products
        # The last input and what is kept of it, without its graph.
        self.last: torch.Tensor | None = None
        self.last_kept: torch.Tensor | None = None
        # The same for linear layers, which want a matrix.
        self.last_input: torch.Tensor | None = None
        self.last_matrix: torch.Tensor | None = None

    def keep(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an input without its graph.

        Autocast may have cast it; what it was cast to is all that a product needs.
        """
        kept = self.last_kept
        if kept is None or value is not self.last or kept.dtype is not dtype:
            kept = value.detach()
            if kept.dtype is not dtype:
                kept = kept.to(dtype)
            self.last, self.last_kept = value, kept
        return kept

    def keep_matrix(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an input without its graph, as a matrix if that takes no copy."""
        kept = value.detach()
        if kept.dtype is not dtype:
            kept = kept.to(dtype)
        if kept.dim() > 2 and kept.is_contiguous():
            kept = kept.view(-1, kept.shape[-1])
        self.last_input, self.last_matrix = value, kept
        return kept

    def close(self) -> None:
        """Let go of the inputs, after the forward."""
        self.last = self.last_kept = self.last_input = self.last_matrix = None


current_recording: ContextVar[DeferredCalls | None] = ContextVar(
    "penstock_recording", default=None
)


def is_plain_place() -> bool:
    """Whether what runs here is neither checkpointed, offloaded nor transformed.

    In the first two an input is not to be kept, and in the last it is not what it seems.
    """
    return _saved_tensors_hooks(True) is None and _functorch_stack() is None


class CastTo(NamedTuple):
    """Autocast as it was at some moment, to run something again under it."""

    device: str
    dtype: torch.dtype | None

    def __call__(self) -> Any:
        """Return a context with it; what it casts is not remembered for others."""
        if self.dtype is None:
            return torch.autocast(self.device, enabled=False)
        return torch.autocast(self.device, self.dtype, cache_enabled=False)


def current_cast(device: str) -> CastTo:
    """Return what autocast does here with tensors on a kind of device."""
    if not _is_any_autocast_enabled() or not torch.is_autocast_enabled(device):
        return CastTo(device, None)
    return CastTo(device, torch.get_autocast_dtype(device))
