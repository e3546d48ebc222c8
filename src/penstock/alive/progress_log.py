"""What this rank is doing, noted action by action for others to read.

The thread that trains writes; the one of the lifeline reads. Nothing is locked, since every note
is one object that is put in place whole.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from penstock.alive.rank_status import RankStatus
from penstock.alive.waker import Waker
from penstock.files.flight.log import Doing, Phase, spell_out
from penstock.files.flight.record_file import FlightWriter

__all__ = ["AGREEMENT", "FLUSH", "OUTCOME", "Log", "NoLog", "Note", "ProgressLog"]

# The most that is told of an error.
_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a rank does or waits for, prepared once; `peer` is the rank that it needs."""

    doing: Doing
    encoded: bytes
    peer: int | None = None

    @classmethod
    def of(cls, doing: Doing, peer: int | None = None) -> "Note":
        """A note of an action or phase."""
        return cls(doing, FlightWriter.encode(doing), peer)


AGREEMENT, FLUSH, OUTCOME = map(Note.of, (Phase.AGREEMENT, Phase.FLUSH, Phase.OUTCOME))


class Log(Protocol):
    """Takes notes of what a rank does."""

    def begin_step(self) -> None:
        """Another step begins."""

    def start(self, note: Note) -> None:
        """Begin with this."""

    def wait(self, note: Note) -> None:
        """What was begun now waits for this message."""

    def arrived(self) -> None:
        """The message is there."""

    def end(self) -> None:
        """What was begun is done."""

    def fail(self, text: str) -> None:
        """This rank's part of the step has failed."""


class NoLog:
    """Takes no notes, where all ranks are in one process."""

    def begin_step(self) -> None:
        """Nothing to note."""

    def start(self, note: Note) -> None:
        """Nothing to note."""

    def wait(self, note: Note) -> None:
        """Nothing to note."""

    def arrived(self) -> None:
        """Nothing to note."""

    def end(self) -> None:
        """Nothing to note."""

    def fail(self, text: str) -> None:
        """Nothing to note."""


class ProgressLog:
    """The notes of one rank, in memory and in its flight record; rings where others must know."""

    def __init__(self, flight: FlightWriter, bell: Waker) -> None:
        self._flight = flight
        self._bell = bell
        self._call = 0
        self._is_inside = False
        self._steps = 0
        self._done = 0
        self._note: Note | None = None
        self._awaited: Note | None = None
        self._since = perf_counter()
        self._failure: str | None = None
        self._broken: str | None = None

    def enter(self) -> None:
        """A call of all ranks begins."""
        self._failure = self._broken = None
        self._call += 1
        self._is_inside = True

    def leave(self) -> None:
        """The call has ended, well or not."""
        self._is_inside = False

    @property
    def is_inside(self) -> bool:
        """Whether a call is under way."""
        return self._is_inside

    @property
    def call(self) -> int:
        """The number of the last call."""
        return self._call

    def begin_step(self) -> None:
        """Another step begins; steps are counted from 0."""
        self._awaited = None
        self._flight.begin_step(self._steps)
        self._steps += 1

    def start(self, note: Note) -> None:
        """Begin with this."""
        self._note = note
        self._since = perf_counter()
        self._flight.start(note.encoded)

    def wait(self, note: Note) -> None:
        """What was begun now waits for this message."""
        self._awaited = note
        self._flight.wait(note.encoded)

    def arrived(self) -> None:
        """The message is there."""
        self._awaited = None
        self._flight.arrived()

    def end(self) -> None:
        """What was begun is done."""
        self._done += 1
        self._flight.end()

    def fail(self, text: str) -> None:
        """This rank's part of the step has failed."""
        self._failure = text[:_TEXT]
        self._bell.ring()

    def break_off(self, text: str) -> None:
        """A connection of this rank broke."""
        self._broken = text[:_TEXT]
        self._bell.ring()

    def place(self) -> RankStatus:
        """Where this rank is now."""
        note, awaited = self._note, self._awaited
        if note is None:
            return RankStatus(
                self._call, self._is_inside, failure=self._failure, broken=self._broken
            )
        return RankStatus(
            call=self._call,
            is_inside=self._is_inside,
            done=self._done,
            doing=f"{spell_out(note.doing)} of step {self._steps - 1}",
            seconds=perf_counter() - self._since,
            waits_for=note.peer if awaited is None else awaited.peer,
            awaited=None if awaited is None else str(awaited.doing),
            is_meeting=isinstance(note.doing, Phase) and note.doing.is_meeting,
            failure=self._failure,
            broken=self._broken,
        )
