"""Plain values as they travel between ranks: JSON, never pickled."""

import json
from typing import Any

__all__ = ["decode_value", "encode_value"]


def encode_value(value: Any) -> bytes:
    """Return a plain value as one line of JSON."""
    return json.dumps(value).encode()


def decode_value(data: bytes) -> Any:
    """Return the plain value of some JSON; anything else is a `ValueError`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a plain value: {data[:80]!r}") from error
