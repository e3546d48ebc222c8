"""From the files of a checkpoint to tensors in host memory: only the rows that are needed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO

import torch

from penstock.checkpoint.manifest import Chunk, Manifest
from penstock.checkpoint.parts import Box
from penstock.checkpoint.storage.interface import Storage
from penstock.checkpoint.storage.steps import folder_of
from penstock.checkpoint.storage.words import in_words
from penstock.errors import CheckpointError

__all__ = ["Target", "read_targets"]


@dataclass(frozen=True, slots=True)
class Target:
    """A box of a saved tensor, and contiguous host memory of its size for the numbers."""

    key: str
    box: Box
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Read:
    """What a chunk has of a target."""

    chunk: Chunk
    shared: Box
    target: Target


def read_targets(storage: Storage, manifest: Manifest, targets: Iterable[Target]) -> None:
    """Read the numbers of targets, file by file and in the order of the files."""
    reads: dict[str, list[_Read]] = {}
    for target in targets:
        for chunk in manifest.tensors[target.key].chunks:
            shared = target.box.overlap(chunk.box)
            if shared is not None:
                reads.setdefault(chunk.file, []).append(_Read(chunk, shared, target))
    for name, found in reads.items():
        path = f"{folder_of(manifest.step)}/{name}"
        with in_words("read", storage.show(path)), storage.open(path) as file:
            for read in sorted(found, key=lambda read: read.chunk.position):
                if not _read_box(file, read):
                    raise CheckpointError(
                        f"{storage.show(path)} is shorter than when it was saved; load another "
                        "step"
                    )


def _read_box(file: BinaryIO, read: _Read) -> bool:
    """Read what two boxes share; return False if the file ends before."""
    chunk, shared, target = read.chunk.box, read.shared, read.target
    dtype = target.numbers.dtype
    if not shared.sizes:
        file.seek(read.chunk.position)
        return _fill(file, target.numbers)
    row = math.prod(chunk.sizes[1:]) * dtype.itemsize
    file.seek(read.chunk.position + (shared.offsets[0] - chunk.offsets[0]) * row)
    place = _narrow(target.numbers, shared, target.box)
    if shared.sizes[1:] == chunk.sizes[1:] and place.is_contiguous():
        return _fill(file, place)
    rows = torch.empty((shared.sizes[0], *chunk.sizes[1:]), dtype=dtype)
    is_whole = _fill(file, rows)
    begin = (shared.offsets[0], *chunk.offsets[1:])
    place.copy_(_narrow(rows, shared, Box(begin, tuple(rows.shape))))
    return is_whole


def _narrow(tensor: torch.Tensor, inner: Box, outer: Box) -> torch.Tensor:
    """Return the part of a tensor, which has the outer box, in the inner one."""
    for dimension, size in enumerate(inner.sizes):
        if size != outer.sizes[dimension]:
            start = inner.offsets[dimension] - outer.offsets[dimension]
            tensor = tensor.narrow(dimension, start, size)
    return tensor


def _fill(file: BinaryIO, numbers: torch.Tensor) -> bool:
    """Read a contiguous tensor; return False if the file ends before."""
    view = memoryview(numbers.view(-1).view(torch.uint8).numpy().data)
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]  # all binary files have it
        if not count:
            return False
        view = view[count:]
    return True
