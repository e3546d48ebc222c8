"""The guard around every call that all ranks make together: no rank waits for a lost one.

An error that ends a call on this rank is sent to the others. If the call ended because a rank is
lost, all other ranks raise the same error.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import finalize

from penstock.alive.flight_folder import FlightFolder, new_flight_folder
from penstock.alive.heartbeat import Heartbeat
from penstock.alive.progress_log import Log, NoLog, ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.errors import PeerLostError, PenstockError
from penstock.ir.schedule import Schedule
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.control import cannot
from penstock.ranks.faults import LinkLostError
from penstock.ranks.group_transport import GroupTransport

__all__ = ["Guard", "NoGuard", "RankGuard"]

# How long an error that may come from a lost rank waits until that is known.
_NEWS_SECONDS = 1.0
# With replicas: what one of these has done comes by way of more ranks.
_NEWS_OF_REPLICAS_SECONDS = 3.0
# How often a rank that waits for a value looks whether another one is lost.
_LOOK_SECONDS = 0.1

Value = TypeVar("Value")


class Guard(Protocol):
    """A guard of the calls of one pipeline."""

    @property
    def log(self) -> Log:
        """Where to note what this rank is doing."""

    @property
    def watched(self) -> frozenset[int]:
        """The processes that watch one another, by their ranks among all."""

    @property
    def ranks(self) -> frozenset[int]:
        """Those of them that are the ranks of this pipeline."""

    def call(
        self, abort: Callable[[], None] = lambda: None, *, is_shared: bool = False
    ) -> AbstractContextManager[None]:
        """Guard something that every rank does at the same time, as often as the others.

        When a rank is lost, `abort` ends what else the call may wait for. `is_shared` says
        that ranks of replicas do it too.
        """

    def attach(self, transport: GroupTransport, schedule: Schedule) -> None:
        """Take the transport and the schedule of the pipeline, once it is built."""

    @property
    def connections(self) -> Connections:
        """The connections that are aborted if a rank is lost."""

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
        self.watched = self.ranks = frozenset[int]()
        self.connections = Connections()

    def attach(self, transport: GroupTransport, schedule: Schedule) -> None:
        """Do nothing, because nothing is ever aborted."""

    def call(
        self, abort: Callable[[], None] = lambda: None, *, is_shared: bool = False
    ) -> AbstractContextManager[None]:
        """Do nothing, because no other rank can be lost."""
        del abort, is_shared
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
    """A guard of one rank among several.

    `watched` are the ranks, among all, of the processes that watch one another, and `members` the
    places among these of the pipeline's.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        progress_log: ProgressLog,
        timeouts: Timeouts,
        members: Sequence[int],
        watched: Sequence[int],
    ) -> None:
        self._heartbeat = heartbeat
        self._progress_log = progress_log
        self._timeouts = timeouts
        self._members = members
        self.watched = frozenset(watched)
        self.ranks = frozenset(watched[member] for member in members)
        self.connections = Connections()
        self._abort: Callable[[], None] = self.connections.abort
        heartbeat.abort_by(self._abort)
        self._free_device: Callable[[int], None] = lambda _: None
        self._seconds_to_learn = timeouts.silence_seconds + timeouts.stop_seconds
        self._has_replicas = len(members) < heartbeat.size
        finalize(self, heartbeat.close)

    def attach(self, transport: GroupTransport, schedule: Schedule) -> None:
        """Take the transport and the schedule of the pipeline; every rank calls this."""
        control, (rank,) = transport.control, transport.ranks
        path = str(new_flight_folder(self._timeouts.folder)) if rank == 0 else None
        path = control.broadcast(path)
        with control.together(cannot("write its flight record")):
            folder = FlightFolder(Path(path), rank, schedule)
        self._progress_log.attach(folder.writer)
        self._abort = transport.abort

        def free_device(lost: int) -> None:
            if lost in members:
                transport.release(members.index(lost))

        members = self._members
        records = {member: folder.path_of(number) for number, member in enumerate(members)}
        self._free_device = free_device
        self._heartbeat.attach(folder, records, transport.abort, free_device)

    @property
    def log(self) -> Log:
        """Where to note what this rank is doing."""
        return self._progress_log

    def tracking(self) -> AbstractContextManager[None]:
        """Let the guard abort the groups that are opened inside."""
        return self.connections.tracking()

    def require_nobody_lost(self) -> None:
        """Raise an error if a rank is lost and no call has said so yet."""
        lost = self._heartbeat.find_lost(0.0)
        if lost is not None and not self._heartbeat.was_raised:
            raise self._heartbeat.error(lost)

    def close(self) -> None:
        """Leave the other ranks, which do not wait for this one any more."""
        self._heartbeat.close()

    @contextmanager
    def call(
        self, abort: Callable[[], None] = lambda: None, *, is_shared: bool = False
    ) -> Iterator[None]:
        """Report how the call ends here, and raise the same error on all ranks if one is lost."""
        self._heartbeat.enter(abort, is_shared=is_shared)
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
                    self._free_device(lost.rank)
                with suppress(RuntimeError):
                    self._abort()
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
                lost = self._heartbeat.blame_itself(str(error))
        else:
            self._progress_log.fail(f"{type(error).__name__}: {error}")
            # What torch reports of a collective with replicas comes as an error of the step.
            # A loss inside of this call is known here in a moment, by the numbers of these ranks.
            is_own = isinstance(error, PenstockError) and not isinstance(error, PeerLostError)
            seconds = 0.0 if is_own else _NEWS_SECONDS
            if self._has_replicas:
                seconds = _NEWS_OF_REPLICAS_SECONDS
            lost = self._heartbeat.find_lost(seconds)
        if lost is not None:
            raise self._heartbeat.error(lost) from error
