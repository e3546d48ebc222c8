"""What the first half of a backward leaves for the second: products that make weight gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from penstock.errors import PipelineError

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
    """A part of weight gradients that is left for later."""

    def finish(self) -> None:
        """Add it to the gradients, and let go of what it was made from."""


def add_weight_gradients(work: list[DeferredWork]) -> None:
    """Do what waits, the last call first, letting go of each as it is done."""
    with torch.no_grad():
        while work:
            work.pop().finish()


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
    """Add to a weight's gradient what nobody else holds."""
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)


class _Window(NamedTuple):
    """Which numbers of a contiguous weight a view of it shows."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, total: torch.Tensor) -> torch.Tensor:
        """The same numbers of the weight's gradient."""
        return total.as_strided(self.shape, self.strides, total.storage_offset() + self.offset)


class WeightPart:
    """A weight, or what a view shows of one: where a gradient goes."""

    __slots__ = ("_window", "shown", "weight")

    def __init__(self, weight: torch.Tensor, shown: torch.Tensor) -> None:
        """`shown` has the numbers of the weight, or of a view of it without overlaps."""
        self.weight, self.shown = weight, shown
        self._window: _Window | None = None
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
        """Add what nobody else holds."""
        if self._window is None:
            add_gradient(self.weight, gradient)
        else:
            self._add_inside(self._window, lambda total: total.add_(gradient))

    def _add_inside(self, window: _Window, add: Callable[[torch.Tensor], object]) -> None:
        total = self.weight.grad
        if total is not None and total.is_contiguous():
            add(window.of(total))
            return
        made = torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        add(window.of(made))
        add_gradient(self.weight, made)


def has_hooks(weight: torch.Tensor) -> bool:
    """Whether autograd does more with a weight's gradient than adding it."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def require_unchanged(value: torch.Tensor, version: int, shape: Sequence[int]) -> None:
    """Refuse what a layer used and somebody has written to since, as autograd does."""
    if value._version != version:
        what = "weight" if isinstance(value, torch.nn.Parameter) else "input"
        raise PipelineError(
            f"the {what} of a layer (shape {tuple(shape)}) was changed in place before its "
            "gradient was made; change a copy of it"
        )
