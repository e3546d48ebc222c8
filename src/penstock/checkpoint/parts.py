"""Parts of tensors: boxes, each held by a process, that make up the whole without overlap."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError
from penstock.parallel.dtensor import own_part

__all__ = ["Box", "Part", "choose_writers", "list_parts", "local_box", "local_part", "tile_wholly"]

# Along how many dimensions a tensor may be cut; a mesh of processes has fewer.
_MOST_CUTS = 8


@dataclass(frozen=True, slots=True)
class Box:
    """A range along every dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers are in it."""
        return math.prod(self.sizes)

    def overlap(self, other: "Box") -> "Box | None":
        """Return what two boxes share."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True, slots=True)
class Part:
    """What a process could write: a box of a tensor, with the whole tensor's shape and type."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    def to_values(self) -> list[Any]:
        """Return the fields as plain values, in order."""
        return [self.key, self.shape, self.dtype, self.box.offsets, self.box.sizes]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> "Part":
        """Return the part of plain values."""
        key, shape, dtype, offsets, sizes = values
        return cls(key, tuple(shape), dtype, Box(tuple(offsets), tuple(sizes)))


def list_parts(tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """Return the parts that this process holds of some tensors."""
    return [
        Part(key, tuple(t.shape), str(t.dtype).removeprefix("torch."), local_box(t))
        for key, t in tensors.items()
    ]


def local_box(tensor: torch.Tensor) -> Box:
    """Return the box of a tensor that this process holds: all of it, unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # untyped upstream
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in this process's box, without a graph."""
    return own_part(tensor).detach()


def tile_wholly(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Return whether boxes inside of a shape make it up, each number once.

    A sum of boxes is known by its corners: going along one dimension, a box adds one where it
    begins and takes it away where it ends. The corners of all boxes, with these signs, must cancel
    to those of the whole. Dimensions along which no box is cut need no corners.
    """
    whole = Box((0,) * len(shape), tuple(shape))
    filled = [box for box in boxes if box.count]
    if not whole.count or sum(box.count for box in filled) != whole.count:
        return not whole.count and not filled
    cut = [d for d in range(len(shape)) if any(box.sizes[d] != shape[d] for box in filled)]
    if len(cut) > _MOST_CUTS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in filled), (whole, -1)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(
                box.offsets[d] + e * box.sizes[d] for d, e in zip(cut, ends, strict=True)
            )
            corners[corner] += weight * (-1) ** sum(ends)
    return not any(corners.values())


def choose_writers(offers: Sequence[Sequence[Part]]) -> list[list[int]]:
    """Return which of its parts each process writes, by number, so that each is written once.

    Of several processes that hold a part, the one with the fewest bytes so far writes it.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    firsts: dict[str, Part] = {}
    for rank, parts in enumerate(offers):
        for number, part in enumerate(parts):
            first = firsts.setdefault(part.key, part)
            if (part.shape, part.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{part.key} must be the same on all ranks ({list(first.shape)} of "
                    f"{first.dtype} on one, {list(part.shape)} of {part.dtype} on rank {rank})"
                )
            if part.box.count or not math.prod(part.shape):
                holders.setdefault((part.key, part.box), []).append((rank, number))
    written: list[list[int]] = [[] for _ in offers]
    load = [0] * len(offers)
    for (_, box), found in holders.items():
        rank, number = min(found, key=lambda place: load[place[0]])
        load[rank] += box.count
        written[rank].append(number)
    _check_tiling(holders, firsts)
    return written


def _check_tiling(holders: Iterable[tuple[str, Box]], firsts: Mapping[str, Part]) -> None:
    boxes: dict[str, list[Box]] = {}
    for key, box in holders:
        boxes.setdefault(key, []).append(box)
    for key, first in firsts.items():
        if not tile_wholly(first.shape, boxes.get(key, ())):
            raise CheckpointError(
                f"the parts of {key} on all ranks must make up its shape {list(first.shape)}; "
                "save with all ranks that hold a part of it"
            )
