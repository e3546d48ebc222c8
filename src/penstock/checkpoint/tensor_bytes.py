"""Where a tensor's numbers are stored in a file that torch has written, and how to read them.

`torch.save` makes a zip archive in which the numbers are one uncompressed record. Its position is
noted when the checkpoint is saved, so that loading reads numbers and nothing else.
"""

import math
import struct
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile

import torch

from penstock.checkpoint.manifest import Chunk
from penstock.errors import CheckpointError

__all__ = ["find_numbers", "read_rows"]

# The record that holds the numbers of the first storage, and the fixed part of a zip header.
_RECORD = "/data/0"
_HEADER = struct.Struct("<26xHH")


def find_numbers(file: BinaryIO, start: int, length: int) -> int:
    """Return the position of a tensor's numbers, given the part of the file with its archive."""
    # Python's reader refuses an archive that begins in the middle of a file.
    window = BufferedReader(_Window(file, start, length))
    with ZipFile(window) as archive:
        (record,) = [r for r in archive.infolist() if r.filename.endswith(_RECORD)]
        assert record.compress_type == ZIP_STORED, "torch does not compress numbers"
        window.seek(record.header_offset)
        name, extra = _HEADER.unpack(window.read(_HEADER.size))
    return int(start + record.header_offset + _HEADER.size + name + extra)


class _Window(RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read from any position."""
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Continue from another position."""
        base = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the part reaches."""
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def read_rows(
    folder: Path, chunk: Chunk, dtype: torch.dtype, offsets: torch.Size, lengths: torch.Size
) -> torch.Tensor:
    """Return a box of a chunk; read only the rows (along dimension 0) that it spans."""
    row, first, count = math.prod(chunk.sizes[1:]) * dtype.itemsize, 0, 1
    if chunk.sizes:
        first, count = offsets[0], lengths[0]
    numbers = bytearray(row * count)
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.position + first * row)
        if file.readinto(numbers) != len(numbers):
            raise CheckpointError(
                f"{folder / chunk.file} is shorter than when it was saved; load another step"
            )
    rows = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype)
    box = rows.view(count, *chunk.sizes[1:]) if chunk.sizes else rows.view(())
    for dimension in range(1, len(chunk.sizes)):
        box = box.narrow(dimension, offsets[dimension], lengths[dimension])
    return box
