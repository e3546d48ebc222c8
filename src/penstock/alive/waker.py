"""Wakes the heartbeat's thread from any other thread."""

import socket
from contextlib import suppress

__all__ = ["Waker"]


class Waker:
    """A pair of sockets: one thread writes, and another waits for it in a selector."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return what a selector waits for."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the thread that waits; do nothing if there is none any more."""
        with suppress(OSError):
            self._writer.send(b"!")

    def clear(self) -> None:
        """Take all wake-ups so far."""
        with suppress(OSError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
