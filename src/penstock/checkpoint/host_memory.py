"""Host memory for many numbers, in large pages where the system has them.

The system gives out a page when it is first written, which takes several times as long as writing
it. NumPy asks for pages of two mebibytes in place of four kibibytes, and torch does not.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["host_memory"]

# From here on NumPy asks for large pages.
_LONG_BYTES = 2**22


def host_memory(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor in host memory that is about to be written.

    >>> host_memory([2, 3], torch.float16).shape
    torch.Size([2, 3])
    """
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes < _LONG_BYTES:
        return torch.empty(tuple(sizes), dtype=dtype, device="cpu")
    memory = torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))
    return memory.view(dtype).view(tuple(sizes))
