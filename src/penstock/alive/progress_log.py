"""What this rank is doing, noted action by action for others to read.

The training thread writes and the heartbeat's thread reads. Nothing needs a lock, because every
note is one object that is replaced as a whole.
"""

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from penstock.alive.rank_status import RankStatus
from penstock.alive.waker import Waker
from penstock.files.flight.log import Doing, Phase, spell_out
from penstock.files.flight.record_file import FlightWriter
from penstock.ir.actions import Action, Kind

__all__ = ["AGREEMENT", "FLUSH", "OUTCOME", "Log", "NoLog", "Note", "ProgressLog"]

# How much of an error's text is sent to other ranks.
_MOST_LETTERS = 2000
# What a rank does before its first step.
_BUILDING = "the building of its pipeline"
# What a stage does together with its copies in other pipelines.
_WITH_REPLICAS = frozenset((Kind.UNSHARD, Kind.REDUCE_GRAD))


@dataclass(frozen=True, slots=True)
class Note:
    """An action or phase of a rank, encoded once; `peer` is the rank that it waits for."""

    doing: Doing
    encoded: bytes
    peer: int | None = None

    @classmethod
    def of(cls, doing: Doing, peer: int | None = None) -> "Note":
        """Return the note of an action or phase."""
        return cls(doing, FlightWriter.encode(doing), peer)


AGREEMENT, FLUSH, OUTCOME = map(Note.of, (Phase.AGREEMENT, Phase.FLUSH, Phase.OUTCOME))


class Log(Protocol):
    """Notes of what a rank does."""

    def begin_step(self) -> None:
        """Begin another step."""

    def start(self, note: Note) -> None:
        """Note that this begins."""

    def follow(self, note: Note) -> None:
        """Note that the current action is done and that this begins."""

    def wait(self, note: Note) -> None:
        """Note that the current action waits for this message."""

    def arrived(self) -> None:
        """Note that the message has arrived."""

    def end(self) -> None:
        """Note that the current action is done."""

    def fail(self, text: str) -> None:
        """Note that this rank's part of the step has failed."""


class NoLog:
    """No notes, where all ranks are in one process."""

    def begin_step(self) -> None:
        """Do nothing."""

    def start(self, note: Note) -> None:
        """Do nothing."""

    def follow(self, note: Note) -> None:
        """Do nothing."""

    def wait(self, note: Note) -> None:
        """Do nothing."""

    def arrived(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def fail(self, text: str) -> None:
        """Do nothing."""


class ProgressLog:
    """The notes of one rank, in memory and in its flight record; errors wake the heartbeat.

    It gets its record once there is a schedule, before the first step.
    """

    _flight: FlightWriter

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._call = 0
        self._is_inside = False
        self._is_shared = False
        self._steps = 0
        self._done = 0
        self._note: Note | None = None
        self._awaited: Note | None = None
        self._since = perf_counter()
        self._failure: str | None = None
        self._broken: str | None = None

    def attach(self, flight: FlightWriter) -> None:
        """Write a flight record from now on."""
        self._flight = flight

    def enter(self, *, is_shared: bool = False) -> None:
        """Note that a call of all ranks begins, which may be one with ranks of other pipelines."""
        self._failure = self._broken = None
        self._is_shared = is_shared
        self._call += 1
        self._is_inside = True

    def leave(self) -> None:
        """Note that the call has ended, with or without an error."""
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
        """Begin another step; steps are counted from 0."""
        self._awaited = None
        self._flight.begin_step(self._steps)
        self._steps += 1

    def start(self, note: Note) -> None:
        """Note that this begins."""
        self._note = note
        self._since = self._flight.start(note.encoded)

    def follow(self, note: Note) -> None:
        """Note that the current action is done and that this begins."""
        self._done += 1
        self._note = note
        self._since = self._flight.follow(note.encoded)

    def wait(self, note: Note) -> None:
        """Note that the current action waits for this message."""
        self._awaited = note
        self._flight.wait(note.encoded)

    def arrived(self) -> None:
        """Note that the message has arrived."""
        self._awaited = None
        self._flight.arrived()

    def end(self) -> None:
        """Note that the current action is done."""
        self._done += 1
        self._flight.end()

    def fail(self, text: str) -> None:
        """Note that this rank's part has failed, and whether it was one with replicas."""
        self._is_shared |= self._is_joint()
        self._failure = text[:_MOST_LETTERS]
        self._waker.wake()

    def note_broken_link(self, text: str) -> None:
        """Note that a connection of this rank broke."""
        self._broken = text[:_MOST_LETTERS]
        self._waker.wake()

    def status(self) -> RankStatus:
        """Return what this rank is doing now."""
        note, awaited = self._note, self._awaited
        if note is None:
            return RankStatus(
                self._call,
                self._is_inside,
                doing=_BUILDING if self._is_inside else None,
                seconds=perf_counter() - self._since,
                failure=self._failure,
                broken=self._broken,
                is_with_replicas=self._is_shared,
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
            is_with_replicas=self._is_shared or self._is_joint(),
        )

    def _is_joint(self) -> bool:
        """Return whether the current action is one with replicas."""
        note = self._note
        return (
            note is not None
            and isinstance(note.doing, Action)
            and note.doing.kind in _WITH_REPLICAS
        )
