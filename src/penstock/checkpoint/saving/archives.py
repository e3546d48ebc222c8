"""What `torch.save` writes around the numbers of a tensor, so that torch can read them.

It depends on the type and the shape alone. The checksum of the zip archive is left out, which
torch allows: the manifest has a digest of the whole file.
"""

import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.serialization import get_crc32_options, set_crc32_options

__all__ = ["Archive", "archive_of", "archive_value"]


@dataclass(frozen=True, slots=True)
class Archive:
    """The bytes before and after the numbers of a tensor."""

    head: bytes
    tail: bytes


class _Recorder:
    """A file that keeps all but one piece, which it knows by its address in memory."""

    def __init__(self, address: int) -> None:
        self._address = address
        self.before, self.after = bytearray(), bytearray()
        self._is_before = True

    def write(self, data: Any) -> int:
        """Take a piece."""
        view = np.frombuffer(data, dtype=np.uint8)
        if view.size and view.ctypes.data == self._address:
            self._is_before = False
        else:
            (self.before if self._is_before else self.after).extend(view.tobytes())
        return int(view.size)

    def flush(self) -> None:
        """Do nothing, because nothing waits."""


@cache
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    """Return what `torch.save` writes around the numbers of a tensor; none are written."""
    numbers = torch.empty(shape, dtype=dtype, device="cpu")
    recorder = _Recorder(numbers.data_ptr())
    is_summed = get_crc32_options()
    # Otherwise torch would read all the numbers, which do not exist yet.
    set_crc32_options(compute_crc32=False)
    try:
        torch.save(numbers, recorder)  # type: ignore[arg-type]  # it needs two methods only
    finally:
        set_crc32_options(compute_crc32=is_summed)
    assert recorder.after or not numbers.numel(), "torch writes numbers from where they are"
    return Archive(bytes(recorder.before), bytes(recorder.after))


def archive_value(value: Any) -> bytes:
    """Return a plain value as torch reads it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
