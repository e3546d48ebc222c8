"""Split batches into microbatches, and merge their outputs.

A tensor is split along dimension 0 into nearly equal parts, and so is a block mask of flex
attention; everything else is given to every microbatch. `Along`, `Shared` and `Ready` change that
for one argument, or for a part of one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import BatchError
from penstock.step.outputs import KeptOutput
from penstock.tensors.aliases import Aliases
from penstock.tensors.block_masks import BlockMask, has_rows, split_mask
from penstock.tensors.output_tree import fill, outline, tensors_of

__all__ = [
    "Along",
    "Ready",
    "Shared",
    "count_rows",
    "find_dims",
    "item_rows",
    "merge_outputs",
    "ready_parts",
    "share_out",
    "split_batch",
]

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Along:
    """A value whose tensors are split along this dimension: `step(Along(frames, dim=1))`."""

    value: Any
    dim: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that every microbatch gets whole: `step(x, scale=Shared(scale))`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """A value that is split already: one item per microbatch, of any sizes and types.

    Items need not be alike: one may be None, and each may have rows of its own or none at all. The
    tensors of an item are passed unchanged, in `Shared` or not.
    """

    items: Sequence[Any]


def split_batch(value: Any, microbatches: int, aliases: Aliases | None = None) -> list[Any]:
    """Split one argument into microbatches: (3, 3, 2, 2) rows of ten for four.

    Dicts, lists and tuples are split inside; tensors without dimensions are shared. The parts
    share the memory of the whole, and may be written to; all arguments of a step get the same
    `aliases`. No part is ever empty: fewer rows than microbatches are refused, as are tensors
    with different numbers of rows.

    >>> split_batch(torch.arange(3), 2)
    [tensor([0, 1]), tensor([2])]
    """
    sizes = [(shape, shape[dim]) for shape, dim in _split_shapes(value, 0)]
    for shape, rows in sizes:
        if rows != sizes[0][1]:
            raise BatchError(
                f"tensors of shapes {sizes[0][0]} and {shape} would be split together, but have "
                f"{sizes[0][1]} and {rows} rows; wrap what is not split by rows in Shared or Along"
            )
        if rows < microbatches:
            raise BatchError(
                f"a tensor of shape {shape} has {rows} rows for {microbatches} microbatches; use "
                f"at most {rows} microbatches, or wrap it in Shared"
            )
    return _split(value, microbatches, 0, Aliases() if aliases is None else aliases)


def share_out(total: int, parts: int) -> list[int]:
    """Divide `total` items into parts that are as equal as possible, larger ones first.

    >>> share_out(10, 4)
    [3, 3, 2, 2]
    """
    size, larger = divmod(total, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def _split(value: Any, microbatches: int, dim: int, aliases: Aliases) -> list[Any]:
    match value:
        case torch.Tensor() if value.dim():
            return aliases.split(value, share_out(value.shape[dim], microbatches), dim)
        case BlockMask() if has_rows(value):
            return split_mask(value, share_out(value.shape[0], microbatches))
        case Ready():
            if len(value.items) != microbatches:
                raise BatchError(
                    f"Ready must have one item per microbatch (got {len(value.items)} for "
                    f"{microbatches})"
                )
            return [_unwrap(item) for item in value.items]
        case Along():
            return _split(value.value, microbatches, value.dim, aliases)
        case Shared():
            return [value.value] * microbatches
        case Mapping():
            columns = [_split(item, microbatches, dim, aliases) for item in value.values()]
            return [dict(zip(value, row, strict=True)) for row in _rows(columns, microbatches)]
        case tuple() | list():
            columns = [_split(item, microbatches, dim, aliases) for item in value]
            make = _maker_of(value)
            return [make(row) for row in _rows(columns, microbatches)]
        case _:
            return [value] * microbatches


def _unwrap(item: Any) -> Any:
    """Remove the wrappers inside a ready-made item, where they have no meaning."""
    match item:
        case Shared() | Along():
            return _unwrap(item.value)
        case dict():
            inner = {key: _unwrap(part) for key, part in item.items()}
            return item if all(inner[key] is item[key] for key in item) else inner
        case tuple() | list():
            parts = [_unwrap(part) for part in item]
            is_plain = all(a is b for a, b in zip(parts, item, strict=True))
            return item if is_plain else _maker_of(item)(tuple(parts))
        case _:
            return item


def ready_parts(value: Any, dim: int = 0) -> Iterator[tuple[Ready, int]]:
    """Yield the ready-made parts of an argument, each with the dimension of its rows."""
    match value:
        case Ready():
            yield value, dim
        case Along():
            yield from ready_parts(value.value, value.dim)
        case Mapping():
            for part in value.values():
                yield from ready_parts(part, dim)
        case tuple() | list():
            for part in value:
                yield from ready_parts(part, dim)
        case _:
            return


def item_rows(item: Any, dim: int = 0) -> int | None:
    """Return the number of rows of a ready-made item, if it has tensors and they agree.

    >>> item_rows({"tokens": torch.ones(3, 2), "length": 7})
    3
    """
    try:
        found = {shape[along] for shape, along in _split_shapes(item, dim)}
    except BatchError:
        return None
    return found.pop() if len(found) == 1 else None


def _rows(columns: Sequence[Sequence[Any]], microbatches: int) -> list[tuple[Any, ...]]:
    return [tuple(column[number] for column in columns) for number in range(microbatches)]


def _maker_of(value: tuple[Any, ...] | list[Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that makes a list, tuple or named tuple like this one from items."""
    if isinstance(value, list):
        return list
    return getattr(type(value), "_make", tuple)


def _split_shapes(value: Any, dim: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the shapes of the tensors that will be split, each with its dimension."""
    match value:
        case torch.Tensor() if value.dim():
            shape = tuple(value.shape)
            if not -len(shape) <= dim < len(shape):
                raise BatchError(f"a tensor of shape {shape} has no dimension {dim} to split")
            yield shape, dim
        case BlockMask() if has_rows(value):
            yield value.shape, 0
        case Along():
            yield from _split_shapes(value.value, value.dim)
        case Mapping():
            for item in value.values():
                yield from _split_shapes(item, dim)
        case tuple() | list():
            for item in value:
                yield from _split_shapes(item, dim)
        case _:
            return


def count_rows(value: Any) -> int | None:
    """Count the rows of the first tensor in a value that would be split, if there is one.

    A mean over the batch weights the value by this number, and the value can be split into at
    most this number of microbatches.
    """
    return next((shape[dim] for shape, dim in _split_shapes(value, 0)), None)


def find_dims(value: Any) -> list[int]:
    """Find the dimensions along which the tensors of a value are split, if any are.

    >>> find_dims([torch.ones(3), {"frames": Along(torch.ones(2, 3), dim=1)}])
    [0, 1]
    """
    return sorted({dim for _, dim in _split_shapes(value, 0)})


def merge_outputs(
    outputs: Sequence[Any], merge: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
) -> Any:
    """Merge the outputs of all microbatches: tensors along dimension 0.

    `merge` replaces how the tensors of one position are joined, for example by a sum. The
    losses of a `KeptOutput` are weighted and added, as in the step. Other tensors without
    dimensions are stacked. Structure and constants must be the same in all.

    >>> merge_outputs([{"y": torch.ones(2), "n": 3}, {"y": torch.zeros(1), "n": 3}])
    {'y': tensor([1., 1., 0.]), 'n': 3}
    """
    if not outputs:
        raise BatchError("merge_outputs needs at least one output (got none)")
    kept = [one if isinstance(one, KeptOutput) else KeptOutput(one, _NONE, 1.0) for one in outputs]
    texts = [json.dumps(outline(one.value)) for one in kept]
    for number, text in enumerate(texts):
        if text != texts[0]:
            raise BatchError(
                f"the outputs of microbatches 0 and {number} differ in structure or constants: "
                f"{texts[0]} and {text}; let the last stage return the same for every "
                "microbatch, or ask for no outputs"
            )
    columns = zip(*(tensors_of(one.value) for one in kept), strict=True)
    losses = frozenset[int]().union(*(one.losses for one in kept))
    weights = [one.weight for one in kept]
    merged = [
        _add_up(column, weights)
        if merge is None and number in losses
        else (merge or _concatenate)(list(column))
        for number, column in enumerate(columns)
    ]
    return fill(kept[0].value, merged)


def _add_up(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Add up the loss of the batch, skipping weight 0: a mean over nothing is NaN."""
    shares = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack(shares).sum(0) if shares else torch.zeros_like(losses[0])


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len({shape[1:] if shape else None for shape in shapes}) > 1:
        raise BatchError(
            f"outputs of shapes {shapes} do not fit together along dimension 0; give "
            "Pipeline(merge=...) a function that joins them, or ask for no outputs"
        )
    return torch.cat(tensors) if shapes[0] else torch.stack(tensors)
