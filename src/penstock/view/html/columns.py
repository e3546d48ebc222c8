"""Columns of integers as compressed text, embedded in a page.

numbers  5 0 2 -1  ->  zigzag  10 0 4 1  ->  byte planes  ->  deflate  ->  base64

The four bytes of all numbers are stored plane by plane, so that the upper ones, mostly zero,
compress to almost nothing. Browsers can decompress deflate themselves.
"""

import zlib
from base64 import b64encode
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.ir.rows import Bools, Ints

__all__ = ["LIMIT", "encode_columns"]

# The largest magnitude of a number, so that its zigzag form fits into 32 bits.
LIMIT = 2**30


def encode_columns(columns: Mapping[str, Ints | Bools]) -> dict[str, object]:
    """Encode columns of integers between -2**30 and 2**30, with their names and lengths.

    >>> encode_columns({"ranks": np.array([0, 1, 2])})["lengths"]
    {'ranks': 3}
    """
    planes = b"".join(_planes(np.asarray(column, dtype=np.int64)) for column in columns.values())
    packer = zlib.compressobj(level=9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(planes) + packer.flush()
    return {
        "lengths": {name: len(column) for name, column in columns.items()},
        "deflated": b64encode(packed).decode("ascii"),
    }


def _planes(column: NDArray[np.int64]) -> bytes:
    assert len(column) == 0 or np.abs(column).max() <= LIMIT
    zigzag = ((column << 1) ^ (column >> 63)).astype("<u4")
    return zigzag.view(np.uint8).reshape(-1, 4).T.tobytes()
