"""Limits on what a call may take: seconds of the processor, and bytes beyond those held before."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["TookTooLongError", "bounded"]


class TookTooLongError(Exception):
    """What is raised inside a call that has used up its seconds."""


@contextmanager
def bounded(*, seconds: float, bytes_more: int) -> Iterator[None]:
    """Raise inside of what runs here once it takes longer, or asks for more memory.

    Seconds are the processor's, so that a busy machine changes nothing.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_held_bytes() + bytes_more, hard))
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the system's form
    raise TookTooLongError("it has used up its seconds")


def _held_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()
