"""Calls whose weight gradient is one product: which weight, which operands, and how to compute it.

A `find_...` function takes the arguments of a call, in torch's order. It returns how to compute
the weight's gradient later, or None if the call is left to autograd. One argument is a deferred
weight, so that in a product of two operands the plain tensor is the other one. An `_add_...`
function computes the gradient from that of the output and from the tensors that the call has kept.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch

from penstock.deferred.layout import as_matrix, lies_by_columns, multiply_by_columns
from penstock.deferred.work import WeightPart
from penstock.torch_private import grouped_mm

__all__ = [
    "Product",
    "Pull",
    "find_added_product",
    "find_convolution",
    "find_embedding",
    "find_grouped_product",
    "find_indexed_rows",
    "find_linear",
    "find_product",
    "find_transposed_convolution",
]


# How to compute a call's weight gradient. `add(part, gradient of the output, *kept)` adds it.
# `pull(gradient of the output, weight, kept[0], needs_value, needs_rest)` returns the gradients
# that the stage's own pass needs: of `kept[0]`, and of what the call adds to the product, which
# autograd sums where it was broadcast. It is None where that is left to autograd, which is faster
# for operations with as many arguments as a convolution.
# A plain tuple, because one is made in every call.
Pull: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, bool],
    tuple[torch.Tensor | None, torch.Tensor | None],
]
Product: TypeAlias = tuple[
    torch.Tensor, tuple[torch.Tensor, ...], Callable[..., None], Pull | None
]


# ---------------------------------------------------------------- products of matrices


def find_linear(value: Any, weight: Any, bias: Any) -> Product | None:
    """Recognise `value @ weight.T + bias`, where `value` has any number of dimensions."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    return weight, (value,), _add_linear, None if value is bias else _pull_linear


def _add_linear(part: WeightPart, gradient: torch.Tensor, value: torch.Tensor) -> None:
    part.add_product(as_matrix(gradient).t(), as_matrix(value))


def _pull_linear(
    gradient: torch.Tensor, weight: torch.Tensor, value: torch.Tensor, needs_value: bool, _: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    if not needs_value:
        return None, gradient
    if lies_by_columns(value):
        return multiply_by_columns(gradient, weight), gradient
    return gradient.matmul(weight), gradient


def find_product(left: Any, right: Any) -> Product | None:
    """Recognise `left @ right` of two matrices, of two equal stacks, or of rows and a matrix."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return None
    of_left, of_right = left.dim(), right.dim()
    are_stacks = of_left == of_right == 3 and left.shape[0] == right.shape[0]
    if type(left) is torch.Tensor:
        if of_right == 2 and of_left:
            return right, (left,), _add_right, _pull_left
        return (right, (left,), _add_right_stack, _pull_left) if are_stacks else None
    if are_stacks or of_left == of_right == 2:
        return left, (right,), _add_left, _pull_right
    return None


def find_added_product(added: Any, left: Any, right: Any, beta: Any, alpha: Any) -> Product | None:
    """Recognise `added + left @ right` without factors, unless the weight is also added."""
    product = find_product(left, right) if beta == alpha == 1 else None
    if product is None or product[0] is added:
        return None
    weight, kept, add, pull = product
    return weight, kept, add, None if kept[0] is added else pull


def _add_right(part: WeightPart, gradient: torch.Tensor, value: torch.Tensor) -> None:
    part.add_product(as_matrix(value).t(), as_matrix(gradient))


def _add_right_stack(part: WeightPart, gradient: torch.Tensor, value: torch.Tensor) -> None:
    part.add_product(value.mT, gradient)


def _pull_left(
    gradient: torch.Tensor, right: torch.Tensor, value: torch.Tensor, needs_value: bool, _: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    if not needs_value:
        return None, gradient
    if right.dim() == 2 and lies_by_columns(value):
        return multiply_by_columns(gradient, right.t()), gradient
    # For matrices, these two are faster.
    is_matrix = gradient.dim() == 2
    return gradient.mm(right.t()) if is_matrix else gradient.matmul(right.mT), gradient


def _add_left(part: WeightPart, gradient: torch.Tensor, value: torch.Tensor) -> None:
    part.add_product(gradient, value.mT)


def _pull_right(
    gradient: torch.Tensor, left: torch.Tensor, value: torch.Tensor, needs_value: bool, _: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    if not needs_value:
        return None, gradient
    if left.dim() == 2 and lies_by_columns(value):
        return gradient.t().mm(left).t(), gradient
    return left.mT.matmul(gradient), gradient


def find_grouped_product(
    left: Any, right: Any, offsets: Any, bias: Any, out_dtype: Any
) -> Product | None:
    """Recognise rows in groups, each multiplied by its own matrix of a stack."""
    if bias is not None or out_dtype is not None:
        return None
    if offsets is None:
        product = find_product(left, right)
        return None if product is None else (*product[:3], None)
    if left.dim() != 2 or right.dim() != 3:
        return None
    return right, (left, offsets), _add_grouped, None


def _add_grouped(
    part: WeightPart, gradient: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor
) -> None:
    gradient = gradient.contiguous()
    # The result has the memory layout of the weight, which makes adding it fast.
    if part.shown.stride(-1) == 1:
        part.add(grouped_mm(value.t(), gradient, offs=offsets))
    else:
        part.add(grouped_mm(gradient.t(), value, offs=offsets).mT)


# ---------------------------------------------------------------- rows of a table


def find_embedding(
    indices: Any,
    weight: Any,
    padding: Any,
    max_norm: Any,
    _norm: Any,
    by_frequency: Any,
    sparse: Any,
) -> Product | None:
    """Recognise `torch.nn.functional.embedding`, whose padding index may be negative."""
    if max_norm is not None or not isinstance(weight, torch.Tensor):
        return None
    row = -1 if padding is None else padding % weight.shape[0]
    return find_indexed_rows(weight, indices, row, by_frequency, sparse)


def find_indexed_rows(
    weight: Any, indices: Any, padding: Any, by_frequency: Any, sparse: Any
) -> Product | None:
    """Recognise `torch.embedding`, unless its gradient is sparse."""
    if sparse:
        return None
    return weight, (indices,), partial(_add_rows, padding, by_frequency), None


def _add_rows(
    padding: int,
    by_frequency: bool,
    part: WeightPart,
    gradient: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    rows = part.shown.shape[0]
    part.add(
        torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, by_frequency)
    )


# ---------------------------------------------------------------- convolutions


# Looked up once, since a look-up in `torch.ops` takes about a microsecond.
_convolution_backward = torch.ops.aten.convolution_backward.default
_ONLY_WEIGHT = (False, True, False)


class _Convolution(NamedTuple):
    """The settings of a convolution, in the order of the arguments of its backward."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    is_transposed: bool
    output_padding: list[int]
    groups: int

    def add(self, part: WeightPart, gradient: torch.Tensor, value: torch.Tensor) -> None:
        """Compute and add the gradient of the weight only."""
        shown = part.shown
        if shown.dtype is not value.dtype:
            shown = shown.to(value.dtype)
        if value.dim() < shown.dim():
            gradient, value = gradient.unsqueeze(0), value.unsqueeze(0)
        _, computed, _ = _convolution_backward(gradient, value, shown, None, *self, _ONLY_WEIGHT)
        part.add(computed)


def find_convolution(
    value: Any, weight: Any, _bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Product | None:
    """Recognise a convolution over any number of dimensions."""
    if not isinstance(weight, torch.Tensor):
        return None
    given = stride, padding, dilation, groups, weight.shape[2:]
    try:
        settings = _convolution_of(*given)
    except TypeError:
        # A list is not hashable.
        settings = _convolution_of.__wrapped__(*given)
    return None if settings is None else (weight, (value,), settings.add, None)


@lru_cache(maxsize=1024)
def _convolution_of(
    stride: Any, padding: Any, dilation: Any, groups: int, kernel: Sequence[int]
) -> _Convolution | None:
    """Return how to compute gradients; cached, since layers repeat their settings."""
    size = len(kernel)
    steps = _per_dimension(dilation, size)
    padded = _symmetric_padding(padding, steps, kernel)
    if padded is None:
        return None
    return _Convolution(_per_dimension(stride, size), padded, steps, False, [0] * size, groups)


def find_transposed_convolution(
    value: Any,
    weight: Any,
    _bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
) -> Product | None:
    """Recognise a transposed convolution over any number of dimensions."""
    if not isinstance(weight, torch.Tensor):
        return None
    size = weight.dim() - 2
    settings = _Convolution(
        _per_dimension(stride, size),
        _per_dimension(padding, size),
        _per_dimension(dilation, size),
        True,
        _per_dimension(output_padding, size),
        groups,
    )
    return weight, (value,), settings.add, None


def _per_dimension(setting: int | Sequence[int], size: int) -> list[int]:
    if isinstance(setting, int):
        return [setting] * size
    return list(setting) * size if len(setting) == 1 else list(setting)


def _symmetric_padding(
    padding: str | int | Sequence[int], dilation: list[int], kernel: Sequence[int]
) -> list[int] | None:
    """Return the padding on either side, or None if the two sides differ."""
    if not isinstance(padding, str):
        return _per_dimension(padding, len(kernel))
    if padding == "valid":
        return [0] * len(kernel)
    both = [step * (length - 1) for step, length in zip(dilation, kernel, strict=True)]
    return None if any(sides % 2 for sides in both) else [sides // 2 for sides in both]
