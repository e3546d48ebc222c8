"""Input from outside made safe to use: files, numbers, names, and how messages quote them.

Reading is bounded: in bytes by a limit on files, in time because nothing here is slower than
linear, and in depth because nesting beyond Python's own limit is refused.
"""

import json
import re
import tomllib
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ParseError

__all__ = [
    "LARGEST",
    "LARGEST_SUM",
    "clean_name",
    "name_once",
    "parse_json",
    "quote",
    "read_table",
    "read_text",
    "refuse_constant",
    "to_quantity",
]

# The largest cost, and the largest sum of costs: whatever is computed from them stays finite.
LARGEST, LARGEST_SUM = 1e100, 1e150
# Smaller seconds and bytes count as 0, so that it is safe to divide by any other.
_SMALLEST = 1e-100
# The largest file; a million actions with their times take a quarter of it.
_PIECE_BYTES, _MOST_PIECES = 2**20, 2**8
_MOST_LETTERS = 80
_MOST_PARTS = 32
_QUOTED = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')""")
_KEY_LETTERS = re.compile(r"[A-Za-z0-9_ \t-]+")


def quote(value: object) -> str:
    """Return a value as messages show it: on one line, and cut where it is long.

    >>> quote("0F\\n0")
    "'0F\\\\n0'"
    >>> quote("a" * 100)[-10:]
    'aaaaaaa...'
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to show"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def clean_name(text: str) -> str:
    """Return a name with a mark in place of every character that cannot be printed.

    >>> clean_name("step\\x1b[2J")
    'step\ufffd[2J'
    """
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def to_quantity(value: object, largest: float = LARGEST) -> float | None:
    """Return seconds or bytes as a number from 0 to the largest, or None if they are not one.

    >>> [to_quantity(value) for value in (3, 1e-320, -1, 10**400, "3")]
    [3.0, 0.0, None, None, None]
    """
    if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
            if 0 <= number <= largest:
                return number if number >= _SMALLEST else 0.0
    return None


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    with file.open("rb") as stream:
        # Python allocates as much as it is asked to read before it has read any of it.
        pieces = list(islice(iter(lambda: stream.read(_PIECE_BYTES), b""), _MOST_PIECES + 1))
    if len(pieces) > _MOST_PIECES:
        raise ParseError(f"the file must not be longer than {_MOST_PIECES * _PIECE_BYTES:,} bytes")
    try:
        return b"".join(pieces).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(
            f"not a text file: byte {error.start} is not UTF-8 ({error.reason})"
        ) from error


def parse_json(text: str) -> Any:
    """Return a JSON value; repeated names, NaN and infinity are errors."""
    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=name_once)
    except ParseError:
        raise
    except RecursionError as error:
        raise ParseError("too many brackets within one another") from error
    except ValueError as error:
        raise ParseError(f"not readable as JSON: {error}") from error


def read_table(file: Path) -> Any:
    """Return what a JSON file holds, or a TOML file if its suffix is not .json."""
    text = read_text(file)
    if file.suffix == ".json":
        return parse_json(text)
    # For keys with many parts, the time of Python's reader grows with their square.
    if "." * _MOST_PARTS in _KEY_LETTERS.sub("", _QUOTED.sub("", text)):
        raise ParseError(f"a key has more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ParseError("too many brackets within one another") from error
    except ValueError as error:
        raise ParseError(f"not readable as TOML: {error}") from error


def refuse_constant(name: str) -> None:
    """Raise an error for NaN and infinities, which Python reads but JSON does not allow."""
    raise ParseError(f"{name} is not a valid number")


def name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object made of these pairs; a repeated name is an error."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ParseError(f"{quote(name)} appears twice in one object")
        found[name] = value
    return found
