"""Around every call that all ranks make together: no rank waits for one that is lost.

Whatever ends a call on this rank is told to the others; whatever ended it on another becomes the
one error that all of them raise.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol
from weakref import finalize

from penstock.alive.heartbeat import Heartbeat
from penstock.alive.lost_rank import unlinked
from penstock.alive.progress_log import Log, NoLog, ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.errors import PenstockError
from penstock.ranks.faults import LinkLostError
from penstock.ranks.group_transport import GroupTransport

__all__ = ["Guard", "NoGuard", "RankGuard"]

# How long an error that may come from a lost rank waits for the news of it.
_NEWS_SECONDS = 1.0


class Guard(Protocol):
    """Watches over the calls of one pipeline."""

    @property
    def log(self) -> Log:
        """Where to note what this rank is doing."""

    def call(self, also: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Something that every rank does at the same time, as often as the others.

        When a rank is lost, `also` ends what else the call may wait for.
        """

    def noting(self) -> AbstractContextManager[None]:
        """Groups that are made inside can be hung up."""


class NoGuard:
    """For a process that is all there is."""

    def __init__(self) -> None:
        self.log: Log = NoLog()

    def call(self, also: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Nobody can be lost."""
        del also
        return nullcontext()

    def noting(self) -> AbstractContextManager[None]:
        """Nothing is ever hung up."""
        return nullcontext()


class RankGuard:
    """For one rank among several."""

    def __init__(
        self, lifeline: Heartbeat, logbook: ProgressLog, transport: GroupTransport, watch: Timeouts
    ) -> None:
        self._lifeline = lifeline
        self._logbook = logbook
        self._transport = transport
        self._patience = watch.silence_seconds + watch.stop_seconds
        finalize(self, lifeline.close)

    @property
    def log(self) -> Log:
        """Where to note what this rank is doing."""
        return self._logbook

    def noting(self) -> AbstractContextManager[None]:
        """Groups that are made inside can be hung up."""
        return self._transport.connections.noting()

    @contextmanager
    def call(self, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Tell the others how the call ends here, and raise the one error if a rank is lost."""
        self._lifeline.enter(also)
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise
        except BaseException as error:
            self._lifeline.close(f"{type(error).__name__} in the middle of a step", is_fault=True)
            raise
        finally:
            self._lifeline.leave()

    def _explain(self, error: Exception) -> None:
        """Raise the error of a lost rank, if that is what this one comes from."""
        if isinstance(error, LinkLostError):
            self._lifeline.break_off(str(error))
            verdict = self._lifeline.find_verdict(self._patience)
            if verdict is None:
                (rank,) = self._transport.ranks
                verdict = unlinked(rank, str(error), self._logbook.place())
        else:
            self._logbook.fail(f"{type(error).__name__}: {error}")
            is_ours = isinstance(error, PenstockError)
            verdict = self._lifeline.find_verdict(0.0 if is_ours else _NEWS_SECONDS)
        if verdict is not None:
            raise self._lifeline.error(verdict) from error
