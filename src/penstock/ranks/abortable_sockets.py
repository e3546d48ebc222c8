"""The connections of process groups, noted while they are made, so that they can be hung up.

A thread that waits in a gloo operation cannot be called back: the operation ends when its message
comes, or when its connection does. So the connection is ended, from another thread.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

__all__ = ["Connections"]

_OPEN_FILES = Path("/dev/fd")


class Connections:
    """Sockets of this process that were opened for one purpose."""

    def __init__(self) -> None:
        # By descriptor and by what it stood for then: a number is used again after closing.
        self._noted: set[tuple[int, int]] = set()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take every socket that is opened inside for one of these."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._noted |= _open_sockets() - before

    def abort(self) -> None:
        """End every connection; whoever waits for something on one gets an error at once."""
        for connection in self._connected():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def own_address(self) -> str | None:
        """The address by which others reach this machine, if there is a connection yet."""
        addresses = [connection.getsockname()[0] for connection in self._connected()]
        return addresses[0] if addresses else None

    def _connected(self) -> Iterator[socket.socket]:
        """Those with somebody at the other end: a listener must be left as it is."""
        for descriptor, _ in sorted(self._noted & _open_sockets()):
            with suppress(OSError), closing(socket.socket(fileno=os.dup(descriptor))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                    yield found


def _open_sockets() -> set[tuple[int, int]]:
    """Descriptor and file number of every socket; none where the system cannot tell."""
    found = set()
    with suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):  # noqa: PTH208  # names, of files soon gone
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found
