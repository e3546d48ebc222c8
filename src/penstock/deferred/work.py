"""Work that the first half of a backward defers to the second: products for weight gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from penstock.errors import PipelineError
from penstock.torch_private import set_grad_enabled

__all__ = [
    "DeferredWork",
    "WeightPart",
    "add_gradient",
    "add_product",
    "add_weight_gradients",
    "has_hooks",
    "require_unchanged",
]


class DeferredWork(Protocol):
    """A deferred contribution to weight gradients."""

    def finish(self) -> None:
        """Add it to the gradients."""


def add_weight_gradients(work: list[DeferredWork]) -> None:
    """Finish deferred work, the last call first, and release each item when it is done."""
    if not work:
        return
    was_enabled = torch.is_grad_enabled()
    # `torch.no_grad` takes longer than some layers.
    set_grad_enabled(False)
    try:
        while work:
            work.pop().finish()
    finally:
        set_grad_enabled(was_enabled)


def add_product(weight: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Add a product of matrices, or of stacks of them, to a weight's gradient."""
    total = weight.grad
    if total is None:
        weight.grad = (rows @ columns).to(weight.dtype)
    else:
        _add_product_to(total, rows, columns)


def _add_product_to(total: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    if total.dtype != rows.dtype or rows.dtype != columns.dtype:
        total.add_(rows @ columns)
    elif total.dim() == 2:
        total.addmm_(rows, columns)
    else:
        total.baddbmm_(rows, columns)


def add_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a weight's gradient; the tensor that is added must have no other user."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)


class _Window(NamedTuple):
    """The elements of a contiguous weight that a view of it shows."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, total: torch.Tensor) -> torch.Tensor:
        """Return the same elements of the weight's gradient."""
        return total.as_strided(self.shape, self.strides, total.storage_offset() + self.offset)


class WeightPart:
    """A weight, or the part of it that a view shows, to which a gradient is added."""

    __slots__ = ("_window", "shown", "weight")

    def __init__(self, weight: torch.Tensor, shown: torch.Tensor) -> None:
        """Take the weight, and as `shown` the weight itself or a view of it without overlaps."""
        self.weight, self.shown = weight, shown
        self._window: _Window | None = None
        if shown is weight:
            return
        strides = shown.stride()
        if strides != weight.stride() or shown.shape != weight.shape:
            offset = int(shown.storage_offset() - weight.storage_offset())
            self._window = _Window(shown.shape, strides, offset)

    def add_product(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Add a product of matrices, or of stacks of them."""
        if self._window is None:
            add_product(self.weight, rows, columns)
        else:
            self._add_inside(self._window, lambda total: _add_product_to(total, rows, columns))

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient; the tensor that is added must have no other user."""
        if self._window is None:
            add_gradient(self.weight, gradient)
        else:
            self._add_inside(self._window, lambda total: total.add_(gradient))

    def _add_inside(self, window: _Window, add: Callable[[torch.Tensor], object]) -> None:
        total = self.weight.grad
        if total is not None and total.is_contiguous():
            add(window.of(total))
            return
        added = torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        add(window.of(added))
        add_gradient(self.weight, added)


def has_hooks(weight: torch.Tensor) -> bool:
    """Whether autograd does more with a weight's gradient than to add it."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def require_unchanged(value: torch.Tensor, version: int, shape: Sequence[int]) -> None:
    """Raise an error, as autograd does, if a tensor was written to after a layer used it."""
    if value._version != version:
        what = "weight" if isinstance(value, torch.nn.Parameter) else "input"
        raise PipelineError(
            "the inputs and weights of layers must stay unchanged until their gradients are "
            f"computed (the {what} of a layer (shape {tuple(shape)}) was changed in place); "
            "change a copy of it"
        )
