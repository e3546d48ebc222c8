"""Encoded columns of numbers, decoded as in the browser."""

import zlib
from base64 import b64decode
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.view.html.columns import LIMIT, encode_columns

numbers = st.lists(st.integers(-LIMIT, LIMIT), max_size=20)


def decode(encoded: dict[str, Any]) -> dict[str, list[int]]:
    """Decode columns as `columns.js` does."""
    planes = zlib.decompress(b64decode(encoded["deflated"]), wbits=-zlib.MAX_WBITS)
    columns, begin = {}, 0
    for name, length in encoded["lengths"].items():
        part = np.frombuffer(planes, np.uint8, 4 * length, begin).reshape(4, length)
        zigzag = part.T.copy().view("<u4").reshape(-1).astype(np.int64)
        columns[name] = ((zigzag >> 1) ^ -(zigzag & 1)).tolist()
        begin += 4 * length
    assert begin == len(planes)
    return columns


@given(st.dictionaries(st.text(min_size=1, max_size=3), numbers, max_size=4))
def test_columns_round_trip(columns: dict[str, list[int]]) -> None:
    arrays = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    assert decode(encode_columns(arrays)) == columns


def test_small_numbers_compress_well() -> None:
    steps = np.tile([3, -1, -2, 0], 50_000)
    text = encode_columns({"steps": steps})["deflated"]
    assert isinstance(text, str)
    assert len(text) < 5_000
