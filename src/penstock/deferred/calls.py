"""What the calls of one forward share whose weight gradients may be deferred."""

from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.torch_private import is_any_autocast_enabled

__all__ = ["CastTo", "DeferredCalls", "current_cast", "current_recording"]


class DeferredCalls:
    """State that the calls of one forward share; several layers often take the same input."""

    __slots__ = ("last", "last_input", "last_kept", "last_matrix", "products", "used")

    def __init__(self, used: set[nn.Parameter], products: set[torch.Tensor]) -> None:
        # Weights used in a call that cannot be deferred, and weights of deferred products.
        self.used = used
        self.products = products
        # The last input, and the same without its graph.
        self.last: torch.Tensor | None = None
        self.last_kept: torch.Tensor | None = None
        # The same for linear layers, which need a matrix.
        self.last_input: torch.Tensor | None = None
        self.last_matrix: torch.Tensor | None = None

    def keep(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an input without its graph, in the dtype that autocast gave it.

        A product needs nothing more.
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
        """Release the inputs, after the forward."""
        self.last = self.last_kept = self.last_input = self.last_matrix = None


current_recording: ContextVar[DeferredCalls | None] = ContextVar(
    "penstock_recording", default=None
)


class CastTo(NamedTuple):
    """The state of autocast during a call, so that the call can run again under it."""

    device: str
    dtype: torch.dtype | None

    def __call__(self) -> Any:
        """Return a context with that state, which adds nothing to the cache of autocast."""
        if self.dtype is None:
            return torch.autocast(self.device, enabled=False)
        return torch.autocast(self.device, self.dtype, cache_enabled=False)


def current_cast(device: str) -> CastTo:
    """Return the current state of autocast for a kind of device."""
    if not is_any_autocast_enabled() or not torch.is_autocast_enabled(device):
        return CastTo(device, None)
    return CastTo(device, torch.get_autocast_dtype(device))
