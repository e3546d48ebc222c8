"""Turning points: where an action that waits for communication lets another one run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

__all__ = ["Counter", "Turning", "reaching", "turning_point", "without_turns"]


class Turning(Protocol):
    """What becomes of the turning points of a running action."""

    def reach(self) -> None:
        """Take note of a turning point; return when the action may continue."""


class Counter:
    """Counts the turning points of an action that runs alone."""

    def __init__(self) -> None:
        self.reached = 0

    def reach(self) -> None:
        """Count."""
        self.reached += 1


_current: ContextVar[Turning | None] = ContextVar("penstock_turning", default=None)
_NO_CONTEXT = nullcontext()


def turning_point() -> None:
    """Let the other action of an overlapped pair run until its own next turning point.

    Call it in a stage's forward, or in the backward of an `autograd.Function`, between the begin
    of asynchronous communication and the wait for it. Outside of an overlapped pair it returns at
    once. Every rank of a process group that communicates in stages has to reach the same turning
    points.

    >>> turning_point()
    """
    turning = _current.get()
    if turning is not None:
        turning.reach()


# The attribute that `torch.compiler.disable` sets. Compiled code calls this function, and does not
# look into it; setting the attribute here loads no compiler.
turning_point._torchdynamo_disable = True  # type: ignore[attr-defined]  # functions take any name


@contextmanager
def reaching(turning: Turning | None) -> Iterator[None]:
    """Give the turning points that are reached inside to `turning`."""
    token = _current.set(turning)
    try:
        yield
    finally:
        _current.reset(token)


def without_turns() -> AbstractContextManager[None]:
    """Let nothing turn inside."""
    return _NO_CONTEXT if _current.get() is None else reaching(None)
