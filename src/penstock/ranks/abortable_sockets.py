"""The connections of process groups, tracked while they are opened so that they can be aborted.

A thread that waits in a gloo operation cannot be interrupted: the operation ends when its message
arrives, or when its connection ends. So another thread shuts the connection down.
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
        # By descriptor and inode, because a descriptor is reused after closing.
        self._tracked: set[tuple[int, int]] = set()
        # What was open before, while a group is being opened: its sockets may be aborted too.
        self._before: set[tuple[int, int]] | None = None
        self.is_aborted = False

    def add(self, connection: socket.socket) -> None:
        """Count a socket as one of these."""
        descriptor = connection.fileno()
        self._tracked.add((descriptor, os.fstat(descriptor).st_ino))

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Count every socket that is opened inside as one of these."""
        before = self._before = _open_sockets()
        try:
            yield
        finally:
            self._tracked |= _open_sockets() - before
            self._before = None

    def abort(self) -> None:
        """Shut every connection down; a thread that waits on one gets an error at once."""
        self.is_aborted = True
        before = self._before
        if before is not None:
            self._tracked |= _open_sockets() - before
        for connection in self._connected():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _connected(self) -> Iterator[socket.socket]:
        """Yield the sockets that have a peer; a listener must be left alone."""
        for descriptor, _ in sorted(self._tracked & _open_sockets()):
            with suppress(OSError), closing(socket.socket(fileno=os.dup(descriptor))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername():
                    yield found


def _open_sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of every socket; none where the system cannot list them."""
    found = set()
    with suppress(FileNotFoundError):
        for name in os.listdir(_OPEN_FILES):  # noqa: PTH208  # names, of files soon gone
            with suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found
