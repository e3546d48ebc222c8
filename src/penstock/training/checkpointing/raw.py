"""Where the numbers of a tensor lie in a file that torch has written, and how they are read.

`torch.save` makes a zip archive in which the numbers are one record that is stored as it is; its
place is noted when the checkpoint is saved, so that loading reads numbers and nothing else.
"""

import math
import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO, cast
from zipfile import ZIP_STORED, ZipFile

import torch

from penstock.errors import CheckpointError
from penstock.training.checkpointing.manifest import Chunk

__all__ = ["find_numbers", "read_rows"]

# The record that holds the numbers of the first storage, and the fixed part of a zip header.
_RECORD = "/data/0"
_HEADER = struct.Struct("<26xHH")


def find_numbers(file: BinaryIO, start: int, length: int) -> int:
    """The position in the file of the numbers of the tensor whose archive lies there."""
    # An archive is found from its end, and may have anything before it: so the map ends there.
    with mmap(file.fileno(), start + length, access=ACCESS_READ) as view:
        with ZipFile(cast(BinaryIO, view)) as archive:
            (record,) = [r for r in archive.infolist() if r.filename.endswith(_RECORD)]
        assert record.compress_type == ZIP_STORED, "torch stores numbers as they are"
        name, extra = _HEADER.unpack_from(view, record.header_offset)
        return int(record.header_offset + _HEADER.size + name + extra)


def read_rows(
    folder: Path, chunk: Chunk, dtype: torch.dtype, offsets: torch.Size, lengths: torch.Size
) -> torch.Tensor:
    """A box out of a chunk; only the rows (along dimension 0) that it spans are read."""
    row, first, count = math.prod(chunk.sizes[1:]) * dtype.itemsize, 0, 1
    if chunk.sizes:
        first, count = offsets[0], lengths[0]
    numbers = bytearray(row * count)
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.position + first * row)
        if file.readinto(numbers) != len(numbers):
            raise CheckpointError(f"{folder / chunk.file} ends before its time; load another step")
    rows = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype)
    box = rows.view(count, *chunk.sizes[1:]) if chunk.sizes else rows.view(())
    for dimension in range(1, len(chunk.sizes)):
        box = box.narrow(dimension, offsets[dimension], lengths[dimension])
    return box
