"""Wakes the thread of the lifeline, from any other."""

import socket
from contextlib import suppress

__all__ = ["Waker"]


class Waker:
    """Rung by one thread, heard by another that waits in a selector."""

    def __init__(self) -> None:
        self._ear, self._hand = socket.socketpair()
        self._ear.setblocking(False)
        self._hand.setblocking(False)

    def fileno(self) -> int:
        """For selectors."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake whoever listens; where nobody does any more, nothing happens."""
        with suppress(OSError):
            self._hand.send(b"!")

    def answer(self) -> None:
        """It was heard, however often it was rung."""
        with suppress(OSError):
            self._ear.recv(4096)

    def close(self) -> None:
        """Let go of both ends."""
        self._ear.close()
        self._hand.close()
