"""From the files of a checkpoint to tensors in host memory: only the rows that are needed.

Long pieces that lie in a file as they will lie in memory can be read by whoever checks the file;
all else is found by its position.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import BinaryIO

import torch

from penstock.checkpoint.loading.files import FilePiece
from penstock.checkpoint.manifest import Chunk, Manifest
from penstock.checkpoint.parts import Box
from penstock.checkpoint.storage.interface import Storage
from penstock.checkpoint.storage.steps import folder_of
from penstock.checkpoint.storage.words import in_words
from penstock.errors import CheckpointError

__all__ = ["Reading", "Target"]

# Shorter pieces are read one by one, after the check.
_LONG_BYTES = 2**18


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


class Reading:
    """What is to be read of the files of a checkpoint, by file and in the order of each file."""

    def __init__(self, manifest: Manifest, targets: Iterable[Target]) -> None:
        self._step = manifest.step
        self._reads: dict[str, list[_Read]] = {}
        for target in targets:
            for chunk in manifest.tensors[target.key].chunks:
                shared = target.box.overlap(chunk.box)
                if shared is not None:
                    self._reads.setdefault(chunk.file, []).append(_Read(chunk, shared, target))
        for found in self._reads.values():
            found.sort(key=_begin)

    def take_long(self, names: Collection[str]) -> dict[str, list[FilePiece]]:
        """Return the long pieces of files, for somebody else to fill: they are not read again."""
        taken: dict[str, list[FilePiece]] = {}
        for name in names & self._reads.keys():
            end, left = 0, []
            for read in self._reads[name]:
                place = _place_of(read)
                if place is None or place.nbytes < _LONG_BYTES or _begin(read) < end:
                    left.append(read)
                    continue
                piece = FilePiece(_begin(read), _bytes_of(place))
                end = piece.position + len(piece.memory)
                taken.setdefault(name, []).append(piece)
            self._reads[name] = left
        return taken

    def read(self, storage: Storage) -> None:
        """Read what is left."""
        for name, reads in self._reads.items():
            path = f"{folder_of(self._step)}/{name}"
            if not reads:
                continue
            with in_words("read", storage.show(path)), storage.open(path) as file:
                for read in reads:
                    if not _read_box(file, read):
                        raise CheckpointError(
                            f"{storage.show(path)} is shorter than when it was saved; load "
                            "another step"
                        )


def _begin(read: _Read) -> int:
    """Return where the first needed row is in its file."""
    chunk, shared = read.chunk.box, read.shared
    if not shared.sizes:
        return read.chunk.position
    row = math.prod(chunk.sizes[1:]) * read.target.numbers.dtype.itemsize
    return read.chunk.position + (shared.offsets[0] - chunk.offsets[0]) * row


def _place_of(read: _Read) -> torch.Tensor | None:
    """Return where numbers go, if they lie there as in the file."""
    place = _narrow(read.target.numbers, read.shared, read.target.box)
    is_whole = read.shared.sizes[1:] == read.chunk.box.sizes[1:]
    return place if is_whole and place.is_contiguous() else None


def _read_box(file: BinaryIO, read: _Read) -> bool:
    """Read what two boxes share; return False if the file ends before."""
    file.seek(_begin(read))
    place = _place_of(read)
    if place is not None:
        return _fill(file, place)
    chunk, shared, target = read.chunk.box, read.shared, read.target
    rows = torch.empty((shared.sizes[0], *chunk.sizes[1:]), dtype=target.numbers.dtype)
    is_whole = _fill(file, rows)
    begin = (shared.offsets[0], *chunk.offsets[1:])
    place = _narrow(target.numbers, shared, target.box)
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
    view = _bytes_of(numbers)
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]  # all binary files have it
        if not count:
            return False
        view = view[count:]
    return True


def _bytes_of(numbers: torch.Tensor) -> memoryview:
    return memoryview(numbers.view(-1).view(torch.uint8).numpy().data)
