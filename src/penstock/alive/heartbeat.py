"""A thread beside the training thread, which keeps in touch with the other ranks.

It sends this rank's status and learns who is lost. Then it aborts this rank's connections, so that
the training thread leaves whatever it waits for. If that does not help, it ends the process.

    rank lost --> announced --> (a moment, if the rank may have been done) --> abort connections
                      `--------------------- stop_seconds ---------------> end the process
"""

import faulthandler
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from selectors import EVENT_READ, BaseSelector
from threading import Event, Thread, current_thread
from time import monotonic
from typing import NoReturn
from weakref import WeakSet

from penstock.alive.flight_folder import FlightFolder
from penstock.alive.lost_rank import LostRank, disconnected, left
from penstock.alive.progress_log import ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from penstock.alive.waker import Waker
from penstock.errors import PeerLostError
from penstock.ranks.faults import EXIT_CODE

__all__ = ["Heartbeat", "require_nobody_missing"]

_LOGGER = getLogger(__name__)

_BEAT_SECONDS = 0.5
# Up to this number of ranks, all beat at the full rate; more of them beat less often.
_RANKS_AT_FULL_RATE = 512
# How long the others may take to finish their call when the lost rank may have done its part.
_SETTLE_SECONDS = 1.0
# How long rank 0 waits until the others have heard of a loss, or of its goodbye: a process that
# ends with something unread takes back what it has just sent.
_ANNOUNCE_SECONDS = 2.0
_GOODBYE_SECONDS = 5.0
# Rank 0 stays until the last rank knows who is lost: as long as a rank may be silent, but at most
# this long.
_MOST_STAY_SECONDS = 60.0
# How often to look whether the training thread has left its call.
_LOOK_SECONDS = 0.05
_JOIN_SECONDS = 6.0
_STDERR = 2


class Heartbeat:
    """This rank's side of the heartbeat.

    `numbers` are those by which messages name the ranks. Until `attach`, while its pipeline is
    being built, a rank has no flight record.
    """

    def __init__(
        self,
        node: HeartbeatNode,
        selector: BaseSelector,
        timeouts: Timeouts,
        *,
        numbers: Sequence[int],
        waker: Waker,
        progress_log: ProgressLog,
    ) -> None:
        self._node = node
        self._selector = selector
        self._timeouts = timeouts
        self._progress_log = progress_log
        self._flight_folder: FlightFolder | None = None
        # Until there are connections, and a device that may wait for others.
        self._abort: Callable[[], None] = lambda: None
        self._free_device: Callable[[int], None] = lambda _rank: None
        self._abort_call: Callable[[], None] = lambda: None
        self._numbers = numbers
        usual = _BEAT_SECONDS * max(1.0, len(numbers) / _RANKS_AT_FULL_RATE)
        self._pause = min(usual, timeouts.silence_seconds / 8)
        # What this thread has found, and what the training thread may know.
        self._found: LostRank | None = None
        self._lost: LostRank | None = None
        self._is_known = Event()
        self._goodbye: str | None = None
        self._next_beat = self._found_at = monotonic()
        self._has_aborted = self._was_raised = self._has_freed_device = False
        # Where the flight record is, until the others know.
        self._record = ""
        self._process = os.getpid()
        self._waker = waker
        selector.register(waker, EVENT_READ, self._wake_up)
        self._thread = Thread(target=self._run, name="penstock-heartbeat", daemon=True)
        _OPEN.add(self)
        self._thread.start()

    def abort_by(self, abort: Callable[[], None]) -> None:
        """Abort what a rank opens while its pipeline is being built, if another one is lost."""
        self._abort = abort

    def attach(
        self,
        flight_folder: FlightFolder,
        records: Mapping[int, Path],
        abort: Callable[[], None],
        free_device: Callable[[int], None],
    ) -> None:
        """Take what a built pipeline has; call this inside a call of all ranks.

        `records` are the flight records of the ranks of this pipeline. `abort` ends every wait of
        the training thread for another rank, and `free_device` those of its device for the rank
        that is lost, which may outlast a call.
        """
        self._flight_folder = flight_folder
        self._abort, self._free_device = abort, free_device
        self._node.own_records = records
        self._record = str(records[self._node.rank])
        self._waker.wake()

    # ---- for the training thread

    def enter(self, abort: Callable[[], None] = lambda: None, *, is_shared: bool = False) -> None:
        """Begin a call of all ranks, unless one of them is lost already.

        When a rank is lost, another thread calls `abort` to end what else the call waits for.
        """
        self._abort_call = abort
        self._progress_log.enter(is_shared=is_shared)
        if self._lost is not None:
            self.leave()
            raise self.error(self._lost)

    def wait_until_complete(self, seconds: float) -> bool:
        """Wait until all ranks have come, at most this long; raise if one is lost."""
        if self._lost is not None:
            raise self.error(self._lost)
        return self._node.is_complete.wait(seconds)

    def require_all(self) -> None:
        """Raise if a rank is lost and this process is in a call with it."""
        if self._lost is not None and self._progress_log.is_inside:
            raise self.error(self._lost)

    def leave(self) -> None:
        """End the call."""
        self._progress_log.leave()
        # It may refer to the pipeline, whose end ends this thread.
        self._abort_call = lambda: None

    def find_lost(self, seconds: float) -> LostRank | None:
        """Return the rank that is lost, if that is known now or within this time."""
        self._is_known.wait(seconds)
        return self._lost

    def report_broken_link(self, text: str) -> None:
        """Report to the others that a connection of this rank broke."""
        self._progress_log.note_broken_link(text)

    def blame_itself(self, error: str) -> LostRank:
        """Return this rank as lost, because nobody has explained the error of a connection."""
        me = self._node.me
        return disconnected(me.rank, error, self._progress_log.status()).named(me)

    @property
    def size(self) -> int:
        """How many ranks watch one another."""
        return len(self._numbers)

    @property
    def was_raised(self) -> bool:
        """Whether the user knows of the rank that is lost."""
        return self._was_raised

    def error(self, lost: LostRank) -> PeerLostError:
        """Return the error that every rank raises."""
        self._was_raised = True
        return PeerLostError(self._describe(lost), self._numbers[lost.rank])

    def close(self, reason: str = "its pipeline was closed", *, is_fault: bool = False) -> None:
        """Say goodbye and end the thread; the flight record is kept after a fault.

        After a fault, this rank is lost for all: its own later calls raise what the others raise.
        """
        if self._process != os.getpid() or self._goodbye is not None:
            return
        self._goodbye = reason
        if is_fault and self._lost is None:
            me = self._node.me
            self._lost = left(me.rank, reason, self._progress_log.status()).named(me)
        self._waker.wake()
        if current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS + self._stay_seconds)
        if self._flight_folder is not None:
            self._flight_folder.close(keep=is_fault or self._was_raised)

    def release(self) -> None:
        """Close the descriptors without a word, as a forked copy of this process must."""
        self._node.release()
        self._waker.close()

    def _describe(self, lost: LostRank) -> str:
        last = "" if lost.last is None else f"; {lost.last}"
        text = f"rank {self._numbers[lost.rank]} ({lost.name}) {lost.what}{last}"
        if self._flight_folder is None:
            return text
        return f"{text}\nwhat every rank did: penstock explain {self._flight_folder.folder}"

    # ---- the heartbeat's thread

    def _run(self) -> None:
        try:
            self._keep_in_touch()
        except Exception as error:
            # Nobody would notice that this rank is not watched any more, itself least of all.
            _LOGGER.exception("the heartbeat of rank %d has failed", self._node.rank)
            self._fail(f"its heartbeat failed: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        """Let all ranks know that this one cannot continue, this one first."""
        me = self._node.me
        self._lost = left(me.rank, reason, self._progress_log.status()).named(me)
        self._is_known.set()
        self._abort_call()
        with suppress(RuntimeError):
            self._abort()
        self._goodbye = reason
        with suppress(Exception):
            self._node.announce(self._lost)
        self.release()

    def _keep_in_touch(self) -> None:
        before = monotonic()
        while self._goodbye is None:
            for key, _ in self._selector.select(self._seconds_to_wait()):
                key.data()
            now = monotonic()
            if now - before > self._timeouts.silence_seconds / 2:
                self._node.restart_clocks(now)
            before = now
            if now >= self._next_beat:
                self._next_beat = now + self._pause
                self._node.beat(self._progress_log.status())
                self._note_beat()
            self._look(now)
        self._say_goodbye(self._goodbye)

    def _note_beat(self) -> None:
        if self._flight_folder is not None:
            self._flight_folder.writer.beat()
            if self._record:
                self._node.note_record(self._record)
                self._record = ""

    def _seconds_to_wait(self) -> float:
        if self._found is not None and (self._lost is None or self._progress_log.is_inside):
            return _LOOK_SECONDS
        # Ranks of large groups beat less often, but look as often as those of small ones.
        return min(_BEAT_SECONDS, max(0.0, self._next_beat - monotonic()))

    def _wake_up(self) -> None:
        self._waker.clear()
        self._next_beat = monotonic()

    def _look(self, now: float) -> None:
        """Find out whether a rank is lost, and free the training thread if one is."""
        if self._lost is None:
            if self._found is None:
                status = self._progress_log.status()
                self._found, self._found_at = self._node.find_lost(status, now), now
                if self._found is None:
                    return
                self._node.announce(self._found)
            # The others first: this process may end as soon as its own thread knows.
            if not self._node.is_acknowledged and now - self._found_at < _ANNOUNCE_SECONDS:
                return
            self._lost = self._found
            self._is_known.set()
        if self._is_settled(self._lost, now - self._found_at) and not self._has_freed_device:
            self._has_freed_device = True
            # If this does not work, the next call raises all the same.
            with suppress(RuntimeError):
                self._free_device(self._lost.rank)
        if self._progress_log.is_inside:
            self._free_training_thread(self._lost, now - self._found_at)

    def _free_training_thread(self, lost: LostRank, seconds: float) -> None:
        if seconds >= self._timeouts.stop_seconds:
            self._end_process(lost)
        if not self._has_aborted and self._is_settled(lost, seconds):
            self._has_aborted = True
            self._abort_call()
            # If this does not work, the process will be ended.
            with suppress(RuntimeError):
                self._abort()

    @staticmethod
    def _is_settled(lost: LostRank, seconds: float) -> bool:
        """Return whether a rank that may have done its part has had its time."""
        return seconds >= _SETTLE_SECONDS or not lost.may_be_done

    def _end_process(self, lost: LostRank) -> NoReturn:
        doing = self._progress_log.status().doing or "a call of all ranks"
        text = (
            f"penstock: {self._describe(lost)}\n"
            f"this is rank {self._numbers[self._node.rank]}, which did not leave {doing} within "
            f"{self._timeouts.stop_seconds:g} s; its process ends now with exit code {EXIT_CODE}\n"
        )
        if self._flight_folder is not None:
            self._flight_folder.close(keep=True)
        os.write(_STDERR, text.encode())
        faulthandler.dump_traceback(_STDERR)
        os._exit(EXIT_CODE)

    def _say_goodbye(self, reason: str) -> None:
        self._stay_until(lambda: self._node.is_known_to_all, self._stay_seconds)
        status = self._progress_log.status()
        self._node.say_goodbye(status.call - status.is_inside, reason, status)
        self._stay_until(lambda: self._node.is_acknowledged, _GOODBYE_SECONDS)
        self._node.close()
        self._selector.close()
        self._waker.close()

    def _stay_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Serve the other ranks until something is over, at most this long."""
        end = monotonic() + seconds
        while not is_over() and monotonic() < end:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                key.data()

    @property
    def _stay_seconds(self) -> float:
        return min(self._timeouts.silence_seconds, _MOST_STAY_SECONDS)


def require_nobody_missing() -> None:
    """Raise if a rank is lost that is needed for the call around what this process does now."""
    for heartbeat in list(_OPEN):
        heartbeat.require_all()


def _release_all() -> None:
    for heartbeat in list(_OPEN):
        heartbeat.release()


# A forked copy of a process, such as one that loads data, must not hold its connections: the
# others would not see them end with the process. Fork hooks belong to modules, not to objects.
_OPEN: WeakSet[Heartbeat] = WeakSet()
os.register_at_fork(after_in_child=_release_all)
