"""The guard around every call that all ranks make together: no rank waits for a lost one.

An error that ends a call on this rank is sent to the others. If the call ended because a rank is
lost, all other ranks raise the same error.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol, TypeVar
from weakref import finalize

from penstock.alive.heartbeat import Heartbeat
from penstock.alive.lost_rank import disconnected
from penstock.alive.progress_log import Log, NoLog, ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.errors import PenstockError
from penstock.ranks.faults import LinkLostError
from penstock.ranks.group_transport import GroupTransport

__all__ = ["Guard", "NoGuard", "RankGuard"]

# How long an error that may come from a lost rank waits until that is known.
_NEWS_SECONDS = 1.0
# How often a rank that waits for a value looks whether another one is lost.
_LOOK_SECONDS = 0.1

Value = TypeVar("Value")


class Guard(Protocol):
    """A guard of the calls of one pipeline."""

    @property
    def log(self) -> Log:
        """Where to note what this rank is doing."""

    def call(self, abort: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Guard something that every rank does at the same time, as often as the others.

        When a rank is lost, `abort` ends what else the call may wait for.
        """

    def wait(self, value: Future[Value]) -> Value:
        """Wait for a value from other ranks; any thread of any rank may, as often as it likes."""

    def tracking(self) -> AbstractContextManager[None]:
        """Let the guard abort the groups that are opened inside."""

    def require_nobody_lost(self) -> None:
        """Raise an error if a rank is lost and no call has said so yet."""

    def close(self) -> None:
        """Leave the other ranks, which do not wait for this one any more."""


class NoGuard:
    """A guard of a process that runs all ranks."""

    def __init__(self) -> None:
        self.log: Log = NoLog()

    def call(self, abort: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
        """Do nothing, because no other rank can be lost."""
        del abort
        return nullcontext()

    def wait(self, value: Future[Value]) -> Value:
        """Wait for a value."""
        return value.result()

    def tracking(self) -> AbstractContextManager[None]:
        """Do nothing, because nothing is ever aborted."""
        return nullcontext()

    def require_nobody_lost(self) -> None:
        """Do nothing, because no other rank can be lost."""

    def close(self) -> None:
        """Nobody is left behind."""


class RankGuard:
    """A guard of one rank among several."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        progress_log: ProgressLog,
        transport: GroupTransport,
        timeouts: Timeouts,
    ) -> None:
        self._heartbeat = heartbeat
        self._progress_log = progress_log
        self._transport = transport
        self._seconds_to_learn = timeouts.silence_seconds + timeouts.stop_seconds
        finalize(self, heartbeat.close)

    @property
    def log(self) -> Log:
        """Where to note what this rank is doing."""
        return self._progress_log

    def tracking(self) -> AbstractContextManager[None]:
        """Let the guard abort the groups that are opened inside."""
        return self._transport.connections.tracking()

    def require_nobody_lost(self) -> None:
        """Raise an error if a rank is lost and no call has said so yet."""
        lost = self._heartbeat.find_lost(0.0)
        if lost is not None and not self._heartbeat.was_raised:
            raise self._heartbeat.error(lost)

    def close(self) -> None:
        """Leave the other ranks, which do not wait for this one any more."""
        self._heartbeat.close()

    @contextmanager
    def call(self, abort: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Report how the call ends here, and raise the same error on all ranks if one is lost."""
        self._heartbeat.enter(abort)
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise
        except BaseException as error:
            self._heartbeat.close(f"{type(error).__name__} in the middle of a step", is_fault=True)
            raise
        finally:
            self._heartbeat.leave()

    def wait(self, value: Future[Value]) -> Value:
        """Wait for a value from other ranks, or raise the error of a rank that is lost."""
        while not wait_for([value], _LOOK_SECONDS).done:
            lost = self._heartbeat.find_lost(0.0)
            if lost is not None and not value.done():
                # Outside of calls nobody else ends what other threads and the device wait for. By
                # name first: messages between the remaining ranks may still come.
                with suppress(RuntimeError):
                    self._transport.release(lost.rank)
                with suppress(RuntimeError):
                    self._transport.abort()
                raise self._heartbeat.error(lost)
        try:
            return value.result()
        except LinkLostError as error:
            self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        """Raise the error of a lost rank, if this error is a consequence of it."""
        if isinstance(error, LinkLostError):
            self._heartbeat.report_broken_link(str(error))
            lost = self._heartbeat.find_lost(self._seconds_to_learn)
            if lost is None:
                (rank,) = self._transport.ranks
                lost = disconnected(rank, str(error), self._progress_log.status())
        else:
            self._progress_log.fail(f"{type(error).__name__}: {error}")
            is_ours = isinstance(error, PenstockError)
            lost = self._heartbeat.find_lost(0.0 if is_ours else _NEWS_SECONDS)
        if lost is not None:
            raise self._heartbeat.error(lost) from error
