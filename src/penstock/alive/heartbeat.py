"""A thread beside the one that trains, which keeps in touch with the other ranks.

It tells them where this rank is, and hears who is lost. Then it hangs up this rank's connections,
so that the thread that trains comes out of whatever it waits for; and if that does not help, it
ends the process.

    rank lost --> verdict --> (a moment, if the rank may have been done) --> hang up
                     `-------------- stop_seconds --------------> end the process
"""

import faulthandler
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from selectors import EVENT_READ, BaseSelector
from threading import Event, Thread, current_thread
from time import monotonic
from typing import NoReturn, Protocol
from weakref import WeakSet

from penstock.alive.flight_folder import FlightFolder
from penstock.alive.lost_rank import LostRank
from penstock.alive.progress_log import ProgressLog
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import EXIT_CODE, Timeouts
from penstock.alive.waker import Waker
from penstock.errors import PeerLostError

__all__ = ["Heartbeat", "HeartbeatEnd"]

_BEAT_SECONDS = 0.5
# So many ranks may beat at the full rate; with more the hub is told less often.
_RANKS_AT_FULL_RATE = 128
# How long the others may still end their call when a rank has gone that may have been done.
_SETTLE_SECONDS = 1.0
# How long rank 0 waits until the others have heard its verdict, or its goodbye: a process that
# ends with something unread takes back what it has just sent.
_HEARD_SECONDS = 2.0
_PART_SECONDS = 0.5
# How often to look whether the thread that trains has come out.
_LOOK_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_STDERR = 2


def _nothing() -> None:
    """What most calls wait for besides the pipeline's own connections."""


class HeartbeatEnd(Protocol):
    """One rank's end of the connections; its methods are called by one thread."""

    @property
    def rank(self) -> int:
        """The rank at this end."""

    def beat(self, place: RankStatus) -> None:
        """Tell the others where this rank is."""

    def judge(self, place: RankStatus, now: float) -> LostRank | None:
        """The rank that is lost by now, if one is."""

    def forgive(self, now: float) -> None:
        """This process has slept: that it has heard nobody means nothing."""

    def proclaim(self, verdict: LostRank) -> None:
        """Tell the others who is lost."""

    @property
    def is_heard(self) -> bool:
        """Whether all that can have heard the verdict, or the goodbye."""

    def part(self, calls: int, why: str, place: RankStatus) -> None:
        """Say goodbye, after so many calls."""

    def close(self) -> None:
        """Let go of all connections."""


class Heartbeat:
    """This rank's side of the watch over all ranks.

    `names` says of every rank which process on which machine it is.
    """

    def __init__(
        self,
        end: HeartbeatEnd,
        selector: BaseSelector,
        watch: Timeouts,
        *,
        names: Sequence[str],
        bell: Waker,
        logbook: ProgressLog,
        records: FlightFolder,
        hang_up: Callable[[], None],
    ) -> None:
        self._end = end
        self._selector = selector
        self._watch = watch
        self._names = names
        self._logbook = logbook
        self._records = records
        self._hang_up = hang_up
        self._also: Callable[[], None] = _nothing
        usual = _BEAT_SECONDS * max(1.0, len(names) / _RANKS_AT_FULL_RATE)
        self._pause = min(usual, watch.silence_seconds / 4)
        # What was found, and what the thread that trains may know.
        self._found: LostRank | None = None
        self._verdict: LostRank | None = None
        self._is_known = Event()
        self._farewell: str | None = None
        self._next_beat = self._since = monotonic()
        self._has_hung_up = self._was_raised = False
        self._process = os.getpid()
        self._bell = bell
        selector.register(bell, EVENT_READ, self._answer_bell)
        self._thread = Thread(target=self._run, name="penstock-lifeline", daemon=True)
        _OPEN.add(self)
        self._thread.start()

    # ---- for the thread that trains

    def enter(self, also: Callable[[], None] = _nothing) -> None:
        """A call of all ranks begins, unless one of them is lost already.

        `also` ends what else the call may wait for, when a rank is lost; another thread calls it.
        """
        self._also = also
        self._logbook.enter()
        if self._verdict is not None:
            self.leave()
            raise self.error(self._verdict)

    def leave(self) -> None:
        """The call has ended."""
        self._logbook.leave()
        # It may hold on to the pipeline, whose end ends this thread.
        self._also = _nothing

    def find_verdict(self, seconds: float) -> LostRank | None:
        """Who is lost; known by now, or within so many seconds."""
        self._is_known.wait(seconds)
        return self._verdict

    def break_off(self, text: str) -> None:
        """Tell the others that a connection of this rank broke."""
        self._logbook.break_off(text)

    def error(self, verdict: LostRank) -> PeerLostError:
        """The error that every rank raises."""
        self._was_raised = True
        return PeerLostError(self._describe(verdict), verdict.rank)

    def close(self, why: str = "its pipeline was closed", *, is_fault: bool = False) -> None:
        """Say goodbye and end the thread; what the flight record tells is kept after a fault."""
        if self._process != os.getpid() or self._farewell is not None:
            return
        self._farewell = why
        self._bell.ring()
        if current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        self._records.close(keep=is_fault or self._was_raised)

    def let_go(self) -> None:
        """In a copy of this process: the connections are not its own."""
        self._end.close()
        self._bell.close()

    def _describe(self, verdict: LostRank) -> str:
        rank = f"rank {verdict.rank} ({self._names[verdict.rank]})"
        last = "" if verdict.last is None else f"; {verdict.last}"
        folder = self._records.folder
        return f"{rank} {verdict.what}{last}\nwhat every rank did: penstock explain {folder}"

    # ---- the thread of the lifeline

    def _run(self) -> None:
        before = monotonic()
        while self._farewell is None:
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            now = monotonic()
            if now - before > self._watch.silence_seconds / 2:
                self._end.forgive(now)
            before = now
            if now >= self._next_beat:
                self._next_beat = now + self._pause
                self._end.beat(self._logbook.place())
                self._records.writer.beat()
            self._look(now)
        self._part(self._farewell)

    def _timeout(self) -> float:
        if self._found is not None and (self._verdict is None or self._logbook.is_inside):
            return _LOOK_SECONDS
        return max(0.0, self._next_beat - monotonic())

    def _answer_bell(self) -> None:
        self._bell.answer()
        self._next_beat = monotonic()

    def _look(self, now: float) -> None:
        """See whether a rank is lost, and bring the thread that trains out if one is."""
        if self._verdict is None:
            if self._found is None:
                self._found, self._since = self._end.judge(self._logbook.place(), now), now
                if self._found is None:
                    return
                self._end.proclaim(self._found)
            # The others first: this process may end as soon as its own thread knows.
            if not self._end.is_heard and now - self._since < _HEARD_SECONDS:
                return
            self._verdict = self._found
            self._is_known.set()
        if self._logbook.is_inside:
            self._bring_out(self._verdict, now - self._since)

    def _bring_out(self, verdict: LostRank, seconds: float) -> None:
        if seconds >= self._watch.stop_seconds:
            self._end_process(verdict)
        if not self._has_hung_up and (seconds >= _SETTLE_SECONDS or not verdict.is_quiet):
            self._has_hung_up = True
            self._also()
            # Where that does not work, the process will be ended.
            with suppress(RuntimeError):
                self._hang_up()

    def _end_process(self, verdict: LostRank) -> NoReturn:
        doing = self._logbook.place().doing or "a call of all ranks"
        text = (
            f"penstock: {self._describe(verdict)}\nthis is rank {self._end.rank}, which did not "
            f"come out of {doing} within {self._watch.stop_seconds:g} s of that, so that its "
            f"process ends now, with exit code {EXIT_CODE}\n"
        )
        self._records.close(keep=True)
        os.write(_STDERR, text.encode())
        faulthandler.dump_traceback(_STDERR)
        os._exit(EXIT_CODE)

    def _part(self, why: str) -> None:
        place = self._logbook.place()
        self._end.part(place.call - place.is_inside, why, place)
        end = monotonic() + _PART_SECONDS
        while not self._end.is_heard and monotonic() < end:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                key.data()
        self.let_go()
        self._selector.close()


def _let_go_of_all() -> None:
    for lifeline in list(_OPEN):
        lifeline.let_go()


# A copy of a process, such as one that loads data, must not hold its connections: the others
# would not see them end when the process does. Forks are told to modules, not to objects.
_OPEN: WeakSet[Heartbeat] = WeakSet()
os.register_at_fork(after_in_child=_let_go_of_all)
