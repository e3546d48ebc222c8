"""A connection that carries short messages of plain values, one per line."""

import socket
from collections.abc import Iterator
from typing import Any

from penstock.ranks.control import decode_value, encode_value

__all__ = ["ConnectionBrokenError", "JsonConnection"]

# The longest message, and the most bytes that may wait until the other side takes them.
_MOST_BYTES = 16_384
_MOST_WAITING = 65_536


class ConnectionBrokenError(Exception):
    """The other side is gone, or has sent something that is not a message."""


class JsonConnection:
    """One end of a connection; no method ever waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._received = bytearray()
        self._waiting = bytearray()

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._connection.fileno()

    def send(self, *words: Any) -> None:
        """Send a message, or drop it if the other side has not taken the ones before it."""
        data = encode_value(words) + b"\n"
        if len(self._waiting) + len(data) <= _MOST_WAITING:
            self._waiting += data
        try:
            del self._waiting[: self._connection.send(self._waiting)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionBrokenError(str(error)) from error

    def receive(self) -> Iterator[list[Any]]:
        """Yield the messages that have come; then raise if no more can come."""
        is_over = self._read()
        while (end := self._received.find(b"\n")) >= 0:
            text = bytes(self._received[:end])
            del self._received[: end + 1]
            yield _parse(text)
        if len(self._received) > _MOST_BYTES:
            raise ConnectionBrokenError(f"a message is longer than {_MOST_BYTES} bytes")
        if is_over:
            raise ConnectionBrokenError("the connection was closed")

    def _read(self) -> bool:
        """Take what has come; return whether the connection is closed."""
        while len(self._received) <= _MOST_BYTES:
            try:
                data = self._connection.recv(4096)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._received += data
        return False

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _parse(text: bytes) -> list[Any]:
    try:
        words = decode_value(text)
    except ValueError as error:
        raise ConnectionBrokenError(str(error)) from error
    if not isinstance(words, list) or not words:
        raise ConnectionBrokenError(f"not a message: {text[:80]!r}")
    return words
