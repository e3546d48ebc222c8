"""Trace files read piece by piece, so that a file of any length takes bounded memory.

{"schemaVersion": 1, "traceEvents": [{...}, {...}], "displayTimeUnit": "ms"}
 Field                               Event  Event   Field

Trace viewers read such files: JSON, compressed or not, with all events in one list.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from penstock.errors import ParseError
from penstock.untrusted import name_once, quote, refuse_constant

__all__ = ["Event", "Field", "read_pieces"]

_EVENTS = "traceEvents"
_SPACES = re.compile(r"[ \t\n\r]+")
_GZIP = b"\x1f\x8b"
_CHUNK = 2**20
# The most characters of one event, or of one field beside the events.
_MOST_CHARACTERS = 2**24


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the file beside its events."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Event:
    """One event and its number in the file, counted from 0."""

    number: int
    fields: dict[str, Any]


def read_pieces(file: Path) -> Iterator[Field | Event]:
    """Yield the fields and events of a trace file, in order.

    A file that is not such a list of events is an error where it stops being one.
    """
    with _open(file) as stream:
        source = _Source(stream)
        if source.take("{[") == "[":
            yield from _read_events(source)
        else:
            yield from _read_fields(source)
        source.finish()


@contextmanager
def _open(file: Path) -> Iterator[TextIO]:
    """Open a file as text, unpacked if it is compressed."""
    with file.open("rb") as raw:
        is_compressed = raw.read(len(_GZIP)) == _GZIP
    opener = gzip.open if is_compressed else open
    try:
        with opener(file, "rt", encoding="utf-8") as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ParseError(f"not readable as text: {error}") from error


class _Source:
    """The text of a file, of which only the part being read is in memory."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._at = 0
        self._is_over = False
        self._place = "at the start"

    def note(self, place: str) -> None:
        """Note where reading is, for errors."""
        self._place = place

    def take(self, wanted: str) -> str:
        """Take the next character other than space, which must be one of these."""
        found = self._peek()
        if not found or found not in wanted:
            raise self._refuse(
                f"expected {' or '.join(wanted)} (got {_letter(found) or 'the end'})"
            )
        self._at += 1
        return found

    def items(self, close: str) -> Iterator[None]:
        """Stop before each item of an open list or object, and after its end."""
        if self._peek() == close:
            self._at += 1
            return
        yield
        while self.take("," + close) != close:
            yield

    def value(self) -> Any:
        """Read one value."""
        self._peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._is_over:
                    raise self._refuse(error.msg[:1].lower() + error.msg[1:]) from error
            except RecursionError as error:
                raise self._refuse("too many brackets within one another") from error
            except ValueError as error:
                raise self._refuse(str(error)) from error
            else:
                # A number at the end of the text so far may continue in the rest.
                if end < len(self._text) or self._is_over:
                    self._at = end
                    return value
            if len(self._text) - self._at > _MOST_CHARACTERS:
                raise self._refuse(f"a value longer than {_MOST_CHARACTERS:,} characters")
            self._fill()

    def finish(self) -> None:
        """Check that nothing follows."""
        if found := self._peek():
            raise self._refuse(f"expected the end (got {_letter(found)})")

    def _peek(self) -> str:
        """Return the next character other than space, or nothing at the end."""
        while True:
            rest = _SPACES.match(self._text, self._at)
            self._at = self._at if rest is None else rest.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_over:
                return ""
            self._fill()

    def _fill(self) -> None:
        more = self._stream.read(_CHUNK)
        self._text, self._at = self._text[self._at :] + more, 0
        self._is_over = not more

    def _refuse(self, reason: str) -> ParseError:
        return ParseError(f"not readable as JSON {self._place}: {reason}")


def _letter(found: str) -> str:
    """Return a character, or its code where it cannot be printed."""
    return found if found.isprintable() else quote(found)


def _read_fields(source: _Source) -> Iterator[Field | Event]:
    names: set[str] = set()
    for _ in source.items("}"):
        name = source.value()
        if not isinstance(name, str) or name in names:
            raise ParseError(
                f"the name of a field must be a string that is not used yet (got {quote(name)})"
            )
        names.add(name)
        source.note(f"in {quote(name)}")
        source.take(":")
        if name == _EVENTS:
            source.take("[")
            yield from _read_events(source)
        else:
            yield Field(name, source.value())
    if _EVENTS not in names:
        # Files of other kinds are known by their first field.
        got = f"with {', '.join(map(quote, sorted(names)[:3]))}" if names else "without fields"
        raise ParseError(
            f"an object must have {quote(_EVENTS)} to be a trace, or begin with a field of a "
            f"plan or of a recorded timeline (got an object {got})"
        )


def _read_events(source: _Source) -> Iterator[Event]:
    for number, _ in enumerate(source.items("]")):
        source.note(f"in event {number}")
        fields = source.value()
        if not isinstance(fields, dict):
            raise ParseError(f"event {number} must be an object (got {quote(fields)})")
        source.note(f"after event {number}")
        yield Event(number, fields)


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=name_once)
