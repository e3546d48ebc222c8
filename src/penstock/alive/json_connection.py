"""A connection on which both sides say small things: a list of plain values, one per line."""

import socket
from collections.abc import Iterator
from typing import Any

from penstock.ranks.control import decode_value, encode_value

__all__ = ["ConnectionBrokenError", "JsonConnection"]

# The longest thing that can be said, and the most that may wait to be taken by the other side.
_LONGEST = 16_384
_MOST_WAITING = 65_536


class ConnectionBrokenError(Exception):
    """The other side has gone, or says what makes no sense."""


class JsonConnection:
    """One end of a connection; nothing here ever waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._heard = bytearray()
        self._waiting = bytearray()

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def say(self, *words: Any) -> None:
        """Say something; where the other side takes nothing any more, it is dropped in the end."""
        data = encode_value(words) + b"\n"
        if len(self._waiting) + len(data) <= _MOST_WAITING:
            self._waiting += data
        try:
            del self._waiting[: self._connection.send(self._waiting)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionBrokenError(str(error)) from error

    def hear(self) -> Iterator[list[Any]]:
        """All that was said since; then a `ConnectionBrokenError` if nothing more can come."""
        is_over = self._read()
        while (end := self._heard.find(b"\n")) >= 0:
            text = bytes(self._heard[:end])
            del self._heard[: end + 1]
            yield _parse(text)
        if is_over or len(self._heard) > _LONGEST:
            raise ConnectionBrokenError("it was closed, or went on without an end")

    def _read(self) -> bool:
        """Take what has come; whether that was all."""
        while len(self._heard) <= _LONGEST:
            try:
                data = self._connection.recv(4096)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._heard += data
        return False

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()


def _parse(text: bytes) -> list[Any]:
    try:
        words = decode_value(text)
    except ValueError as error:
        raise ConnectionBrokenError(str(error)) from error
    if not isinstance(words, list) or not words:
        raise ConnectionBrokenError(f"not a message: {text[:80]!r}")
    return words
