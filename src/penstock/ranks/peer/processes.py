"""Whether the process of another rank on this machine has ended, and with it what its device did.

A connection that broke does not say that: a process that is stopped, or that has closed its
pipeline, still has memory mapped and work queued.
"""

import os
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll
from weakref import finalize

__all__ = ["PeerProcess", "process_name"]

_NAMESPACE = Path("/proc/self/ns/pid")


def process_name() -> str:
    """Return the name by which processes of the same machine and container know this one."""
    return f"{_NAMESPACE.stat().st_ino} {os.getpid()}"


class PeerProcess:
    """Another process, which is running now; never gone if the system cannot watch it."""

    def __init__(self, name: str) -> None:
        self._poll: poll | None = None
        with suppress(OSError, ValueError, AttributeError):
            space, number = name.split()
            if int(space) == _NAMESPACE.stat().st_ino:
                descriptor = os.pidfd_open(int(number))
                finalize(self, os.close, descriptor)
                self._poll = poll()
                self._poll.register(descriptor, POLLIN)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended: all of its threads, and so all that it had open."""
        return self._poll is not None and bool(self._poll.poll(0))
