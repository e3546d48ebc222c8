"""A connection that carries short messages of plain values, one per line."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.ranks.tree.values import decode_value, encode_value

__all__ = ["ConnectionBrokenError", "JsonConnection"]

# The longest message of a caller that is not known yet, and that of a rank. A rank may also leave
# this number of bytes unread before what is sent to it is dropped.
_MOST_BYTES_UNTRUSTED = 1024
_MOST_BYTES = 2**20
_PIECE_BYTES = 65_536


class ConnectionBrokenError(Exception):
    """The other side is gone, or has sent something that is not a message."""


class JsonConnection:
    """One end of a connection; no method ever waits.

    Until it is trusted, messages must be short. A closed connection reads like one that broke.
    """

    def __init__(self, connection: socket.socket, *, is_trusted: bool = False) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._received = bytearray()
        self._waiting = bytearray()
        self._limit = _MOST_BYTES if is_trusted else _MOST_BYTES_UNTRUSTED
        # Whether the other side has sent a message since it is trusted; if not, it may have given
        # this connection up before it was let in.
        self.was_used = False

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._connection.fileno()

    def trust(self) -> None:
        """Allow longer messages, because the other side is a rank."""
        self._limit = _MOST_BYTES
        self.was_used = False

    def send(self, *words: Any) -> None:
        """Send a message, or drop it if the other side has not taken the ones before it."""
        data = encode_value(words) + b"\n"
        if len(self._waiting) + len(data) <= 4 * self._limit:
            self._waiting += data
        self.flush()

    def flush(self) -> None:
        """Send what the other side can take now."""
        while self._waiting:
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
            self.was_used = True
            yield _parse(text)
        if len(self._received) > self._limit:
            raise ConnectionBrokenError(f"a message is longer than {self._limit} bytes")
        if is_over:
            raise ConnectionBrokenError("the connection was closed")

    def _read(self) -> bool:
        """Take what has come; return whether the connection is closed."""
        while len(self._received) <= self._limit:
            try:
                data = self._connection.recv(min(_PIECE_BYTES, self._limit + 1))
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._received += data
        return False

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other side sends can still be read."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def detach(self) -> socket.socket:
        """Return the socket for other use."""
        return self._connection

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
