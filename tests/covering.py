"""Parameters of which a covering part runs by default, and all in `make test-all`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["all_but_slow"]


def all_but_slow(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Return the values as parameters of a test; those that are not chosen are marked slow."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in chosen else pytest.mark.slow,
        )
        for value in values
    ]
