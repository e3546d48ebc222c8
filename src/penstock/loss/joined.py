"""The outputs and targets of several microbatches, joined to those of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from penstock.errors import BatchError
from penstock.tensors.output_tree import fill, outline, tensors_of

__all__ = ["Joined", "Merge", "join_values"]

Merge: TypeAlias = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Joined:
    """One value joined from several, and which of its tensors all of them share."""

    value: Any
    is_shared: tuple[bool, ...]


def join_values(
    values: Sequence[Any], rows: Sequence[int], dim: int, merge: Merge | None = None
) -> Joined:
    """Join the values of microbatches with these rows along a dimension, including their graphs.

    Tensors that do not grow with the rows must be the same in all of them. `merge` is the user's
    function that joins tensors, if there is one.

    >>> join_values([torch.ones(2), torch.zeros(1)], [2, 1], 0).value
    tensor([1., 1., 0.])
    """
    if all(value is values[0] for value in values):
        return Joined(values[0], (True,) * len(_tensors_of_any(values[0])))
    if any(outline(value) != outline(values[0]) for value in values):
        raise BatchError("they differ in structure or constants")
    columns = list(zip(*map(tensors_of, values), strict=True))
    joined = [_join(list(column), rows, dim, merge) for column in columns]
    tensors = [
        column[0] if one is None else one for one, column in zip(joined, columns, strict=True)
    ]
    return Joined(fill(values[0], tensors), tuple(one is None for one in joined))


def _tensors_of_any(value: Any) -> list[torch.Tensor]:
    return tensors_of(value) if value is not None else []


def _join(
    column: list[torch.Tensor], rows: Sequence[int], dim: int, merge: Merge | None
) -> torch.Tensor | None:
    """Join tensors; return None if all of them are the same."""
    if all(tensor is column[0] for tensor in column):
        return None
    if _grow_with(column, rows, dim):
        return torch.cat(column, dim) if merge is None else merge(column)
    shapes = [tuple(tensor.shape) for tensor in column]
    if len(set(shapes)) == 1 and all(torch.equal(column[0], tensor) for tensor in column):
        return None
    raise BatchError(f"tensors of shapes {shapes} do not fit together along dimension {dim}")


def _grow_with(column: Sequence[torch.Tensor], rows: Sequence[int], dim: int) -> bool:
    """Whether the sizes of tensors along a dimension are proportional to the rows."""
    if not all(-tensor.dim() <= dim < tensor.dim() for tensor in column):
        return False
    shapes = [list(tensor.shape) for tensor in column]
    sizes = [shape.pop(dim) for shape in shapes]
    pairs = zip(sizes, rows, strict=True)
    is_fitting = all(shape == shapes[0] for shape in shapes)
    return is_fitting and all(size * rows[0] == row * sizes[0] for size, row in pairs)
