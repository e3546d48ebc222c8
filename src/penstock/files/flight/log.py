"""The flight record of one rank: its last actions, and the one that was running."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Action, Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import ABSENT

__all__ = [
    "Doing",
    "FlightLog",
    "FlightRecord",
    "Phase",
    "RecordTable",
    "spell_out",
]


class Phase(IntEnum):
    """A part of a step besides actions; the number is its code in the file."""

    AGREEMENT = 64
    FLUSH = 65
    OUTCOME = 66

    @property
    def is_meeting(self) -> bool:
        """Whether it ends only when all ranks take part."""
        return self is not Phase.FLUSH

    def __str__(self) -> str:
        return _PHASES[self]


_PHASES = {
    Phase.AGREEMENT: "the agreement before the step",
    Phase.FLUSH: "the wait until all that it sent has left",
    Phase.OUTCOME: "the meeting after the step",
}

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD_INPUT: "backward for inputs",
    Kind.BACKWARD_WEIGHT: "backward for weights",
    Kind.FULL_BACKWARD: "backward",
    Kind.SEND_F: "sending the activation",
    Kind.RECV_F: "receiving the activation",
    Kind.SEND_B: "sending the gradient",
    Kind.RECV_B: "receiving the gradient",
    Kind.UNSHARD: "gathering the weights",
    Kind.RESHARD: "letting go of the gathered weights",
    Kind.REDUCE_GRAD: "reducing the gradients",
    Kind.RECOMPUTE: "recomputing the activation",
    Kind.OFFLOAD: "offloading the activation",
    Kind.RELOAD: "reloading the activation",
}

Doing: TypeAlias = Action | Phase
# Records as the file has them, oldest first; see `RECORD_TYPE` in `layout`.
RecordTable: TypeAlias = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """One action of a rank, with times in seconds of the wall clock, as far as it got.

    `waiting_for` is the receive or send of the last message that the action waited for, and
    `ready` the time at which it arrived.
    """

    step: int
    doing: Doing
    start: float
    waiting_for: Action | None = None
    waiting_since: float | None = None
    ready: float | None = None
    end: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the record ends while its action waits for a message."""
        return self.waiting_since is not None and self.ready is None and self.end is None

    @property
    def last_time(self) -> float:
        """When this record was last written to."""
        times = (self.end, self.ready, self.waiting_since, self.start)
        return next(time for time in times if time is not None)


@dataclass(frozen=True, eq=False)
class FlightLog:
    """The flight record of one rank: who wrote it, and what it did.

    `heard` is when the process last gave a sign of life, `closed` when it closed the record
    because of a fault; both are seconds of the wall clock, None if that did not happen. The
    wall clock is `clock_offset` ahead of the one in the table.
    """

    path: Path
    rank: int
    placement: Placement
    schedule: str
    host: str
    process: int
    began: float
    heard: float | None
    closed: float | None
    clock_offset: float
    table: RecordTable

    def __repr__(self) -> str:
        return f"<FlightLog of rank {self.rank}: {len(self.table)} records in {self.path}>"

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return self.placement.num_ranks

    @property
    def records(self) -> tuple[FlightRecord, ...]:
        """All recorded actions of the rank, oldest first."""
        return self._decode(self.table)

    @cached_property
    def last(self) -> FlightRecord | None:
        """The newest record, if there is any."""
        return self._decode(self.table[-1:])[0] if len(self.table) else None

    @cached_property
    def last_time(self) -> float:
        """When the process last wrote anything."""
        acted = None if self.last is None else self.last.last_time
        times = (self.began, self.heard, self.closed, acted)
        return max(time for time in times if time is not None)

    def of_step(self, step: int) -> tuple[FlightRecord, ...]:
        """Return the records of one step, oldest first."""
        return self._decode(self.table[self.table["step"] == step])

    def _decode(self, table: RecordTable) -> tuple[FlightRecord, ...]:
        return tuple(self._record(*row) for row in table.tolist())

    def _record(
        self,
        step: int,
        start: float,
        doing: tuple[int, int, int, int],
        awaited: tuple[int, int, int, int],
        since: float,
        ready: float,
        end: float,
        _number: int,
    ) -> FlightRecord:
        offset = self.clock_offset
        return FlightRecord(
            step,
            Phase(doing[0]) if doing[0] >= min(Phase) else _action(*doing),
            start + offset,
            _action(*awaited) if since else None,
            *(time + offset if time else None for time in (since, ready, end)),
        )


def _action(kind: int, stage: int, microbatch: int, peer: int) -> Action:
    numbers = (None if number == ABSENT else number for number in (microbatch, peer))
    return Action(Kind(kind), stage, *numbers)


def spell_out(doing: Doing) -> str:
    """Return an action in words, after its text.

    >>> spell_out(Action(Kind.FULL_BACKWARD, 2, 3))
    '2B3 (backward of microbatch 3 in stage 2)'
    """
    if isinstance(doing, Phase):
        return str(doing)
    microbatch = "" if doing.microbatch is None else f" of microbatch {doing.microbatch}"
    return f"{doing} ({_WORDS[doing.kind]}{microbatch} in stage {doing.stage})"
