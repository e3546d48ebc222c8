"""Loops that are written once and run two ways: on lists, or on arrays, compiled by numba.

Short loops run on lists as plain Python. Long ones are worth compiling, where numba is installed:
loading a compiled loop takes a good half second, once. A loop calls only functions that were given
to `compile_loop` as its parts, and makes its columns with `filled`.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

__all__ = ["can_compile", "compile_loop", "filled"]


def can_compile() -> bool:
    """Return whether numba is installed."""
    return find_spec("numba") is not None


def filled(size: int, value: Any) -> Any:
    """Return a column that holds one value: a list, or an array in a compiled loop.

    >>> filled(3, 0.0)
    [0.0, 0.0, 0.0]
    """
    return [value] * size


def compile_loop(loop: Callable[..., Any], *parts: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loop compiled for arrays; `parts` are the functions that it calls."""
    from numba import njit
    from numba.extending import register_jitable

    _compile_filled()
    for part in parts:
        register_jitable(part)
    compiled: Callable[..., Any] = njit(cache=True)(loop)
    return compiled


@cache
def _compile_filled() -> None:
    from numba.extending import overload

    @overload(filled)
    def _make_filled(size: Any, value: Any) -> Any:  # noqa: ARG001  (numba gives the types)
        def fill(size: Any, value: Any) -> Any:
            return np.full(size, value)

        return fill
