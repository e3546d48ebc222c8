"""The types of options: values with units, which their help names."""

from math import inf
from pathlib import Path
from string import ascii_letters
from typing import Any

import click

__all__ = [
    "COUNT",
    "INPUT_FILE",
    "INPUT_FILES",
    "OUTPUT_FILE",
    "OUTPUT_FOLDER",
    "POSITIVE",
    "SHARE",
    "Bytes",
    "Numbers",
]

COUNT = click.IntRange(1)
SHARE = click.FloatRange(0, 1)
POSITIVE = click.FloatRange(0, min_open=True)
INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
# Files, or the folder of a run with its flight records.
INPUT_FILES = click.Path(exists=True, path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path, writable=True)
OUTPUT_FOLDER = click.Path(file_okay=False, path_type=Path)

_PREFIXES = ("", "k", "m", "g", "t", "p")
_UNITS = {
    f"{prefix}ib" if prefix else "": 1024.0**power for power, prefix in enumerate(_PREFIXES)
} | {f"{prefix}b": 1000.0**power for power, prefix in enumerate(_PREFIXES)}


class Bytes(click.ParamType[Any]):
    """A number of bytes, with or without a unit: 1e9, 512MiB, 40GiB, 80 GB."""

    name = "BYTES"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of bytes."""
        found = _read_bytes(str(value))
        if found is None or not 0 <= found < inf:
            message = f"{value!r} must be a number of bytes, such as 1e9, 512MiB or 40GiB"
            self.fail(message, param, ctx)
        return found


class Numbers(click.ParamType[Any]):
    """A number, or several separated by commas; those of bytes may have units."""

    def __init__(self, unit: str, *, is_several: bool) -> None:
        self.name = f"{unit}[,...]" if is_several else unit
        self._is_bytes = unit.startswith("BYTES")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | tuple[float, ...]:
        """Return the number, or all of several."""
        read = _read_bytes if self._is_bytes else _read_number
        numbers = tuple(read(part) for part in str(value).split(","))
        given = tuple(number for number in numbers if number is not None)
        if len(given) < len(numbers):
            self.fail(f"{value!r} must be a number, or numbers separated by commas", param, ctx)
        return given[0] if len(given) == 1 else given


def _read_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_bytes(text: str) -> float | None:
    """Return the number in bytes; None if it is not one, or its unit is unknown."""
    text = text.strip()
    plain = _read_number(text)
    if plain is not None:
        return plain
    number = text.rstrip(ascii_letters)
    found = _read_number(number)
    factor = _UNITS.get(text.removeprefix(number).lower())
    return None if found is None or factor is None else found * factor
