"""The numbers of costs: what each may be, and how it is shown."""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.errors import CostsError
from penstock.untrusted import LARGEST, quote, to_quantity

__all__ = [
    "PerLink",
    "PerStage",
    "Wires",
    "format_values",
    "freeze",
    "freeze_table",
    "freeze_wires",
    "shorten",
]

PerStage: TypeAlias = float | Sequence[float]
PerLink: TypeAlias = float | Sequence[Sequence[float]]
Wires: TypeAlias = Sequence[int] | Sequence[Sequence[int]]

# A repr shows this many numbers of a cost; of more it shows the range.
_FEW_NUMBERS = 4

_MOST_WIRES = 1_000_000


def freeze(name: str, value: object, *, is_single: bool) -> float | tuple[float, ...]:
    """Check every number, and return a number as a float and a sequence as a tuple."""
    items = None if is_single else _items(value)
    if items is None:
        return _number(name, value)
    if not items:
        raise CostsError(f"{name} has no values; give at least one number")
    return tuple(_number(name, item) for item in items)


def freeze_table(name: str, value: object) -> float | tuple[tuple[float, ...], ...]:
    """Return a number as a float, or a square table of numbers as tuples."""
    items = _items(value)
    if items is None:
        return _number(name, value)
    if not items:
        raise CostsError(f"{name} has no values; give at least one number")
    table = tuple(tuple(_number(name, item) for item in _items(row) or ()) for row in items)
    if any(len(row) != len(table) for row in table):
        raise CostsError(f"{name} must be one number or a square table of numbers")
    return table


def freeze_wires(value: object) -> Wires:
    """Return the numbers of wires as tuples: one per rank, or a square table of them."""
    items = _items(value)
    if not items:
        raise CostsError(
            "wires must be one whole number per rank, or a square table of them "
            f"(got {quote(value)})"
        )
    if all(_items(item) is None for item in items):
        return tuple(_whole(item) for item in items)
    table = tuple(tuple(_whole(item) for item in _items(row) or ()) for row in items)
    if any(len(row) != len(table) for row in table):
        raise CostsError("wires must be one whole number per rank, or a square table of them")
    return table


def format_values(values: Mapping[str, object], *, is_json: bool) -> str:
    """Return names and numbers as JSON, or as TOML, with a line for each.

    >>> values = {"forward": (1.0, 2.0), "overlap_gain": {"F+B": 0.5}}
    >>> print(format_values(values, is_json=False), end="")
    forward = [1.0, 2.0]
    overlap_gain = {"F+B" = 0.5}
    """
    if is_json:
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    # TOML reads numbers and lists as JSON writes them, and tables with other signs.
    signs = (", ", " = ")
    lines = [f"{name} = {json.dumps(value, separators=signs)}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def shorten(value: object) -> str:
    """Return a cost on part of a line: all numbers if they are few, else their range.

    >>> shorten((1.0, 2.0)), shorten((1.0,) * 7 + (2.5,))
    ('(1.0, 2.0)', '<8 from 1 to 2.5>')
    """
    if isinstance(value, tuple) and isinstance(value[0], tuple) and isinstance(value[0][0], str):
        return repr(dict(value))
    numbers = np.ravel(np.asarray(value))
    if numbers.size <= _FEW_NUMBERS:
        return repr(value)
    return f"<{numbers.size} from {numbers.min():g} to {numbers.max():g}>"


def _items(value: object) -> list[object] | None:
    """Return the items of a list or array, or None if the value is neither."""
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim else None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return None


def _number(name: str, value: object) -> float:
    number = to_quantity(value)
    if number is None:
        raise CostsError(f"{name} must be from 0 to {LARGEST:g} (got {quote(value)})")
    return number


def _whole(value: object) -> int:
    number = to_quantity(value, _MOST_WIRES)
    if number is None or number != int(number):
        raise CostsError(
            f"a wire must be a whole number from 0 to {_MOST_WIRES} (got {quote(value)})"
        )
    return int(number)
