"""The actions of a schedule: what a rank can do, and the text for it."""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from penstock.errors import ScheduleError

__all__ = [
    "COMPUTE_KINDS",
    "MEMORY_KINDS",
    "OVERLAP_TEXT",
    "Action",
    "Kind",
    "Overlap",
    "Work",
    "chain_peer",
]

OVERLAP_TEXT = "OVERLAP_F_B"

# The columns of a schedule hold numbers below this.
_TOO_MANY = 2**31


class Kind(IntEnum):
    """What an action does; the number is its code in the columns of a schedule."""

    FORWARD = 0
    BACKWARD_INPUT = 1
    BACKWARD_WEIGHT = 2
    FULL_BACKWARD = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRAD = 10
    RECOMPUTE = 11
    OFFLOAD = 12
    RELOAD = 13

    @property
    def text(self) -> str:
        """The letters of this kind in action text."""
        return _TEXTS[self]

    @property
    def is_compute(self) -> bool:
        """Whether this kind runs the model."""
        return self in COMPUTE_KINDS

    @property
    def is_communication(self) -> bool:
        """Whether this kind moves a value between two stages."""
        return Kind.SEND_F <= self <= Kind.RECV_B

    @property
    def is_memory(self) -> bool:
        """Whether this kind decides where a rank holds what a forward has saved."""
        return self in MEMORY_KINDS

    @property
    def takes_bytes_first(self) -> bool:
        """Whether its bytes are taken when it starts; those of other kinds change at its end."""
        return self in (Kind.FORWARD, Kind.RECOMPUTE, Kind.RELOAD)

    @property
    def has_microbatch(self) -> bool:
        """Whether this kind belongs to one microbatch rather than to its stage as a whole."""
        return self <= Kind.RECV_B or self in MEMORY_KINDS


# They have the lowest numbers, so that a column of kinds needs one comparison.
COMPUTE_KINDS = (
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.FULL_BACKWARD,
)
MEMORY_KINDS = (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)
_TEXTS = ("F", "I", "W", "B", *(kind.name for kind in list(Kind)[len(COMPUTE_KINDS) :]))


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work on one rank: a kind, a stage and, for most kinds, a microbatch.

    `peer` is the stage at the other end of a communication. Left out, it is the neighbour in a
    chain: the next stage for `SEND_F` and `RECV_B`, the previous one for `RECV_F` and `SEND_B`.

    >>> str(Action(Kind.FORWARD, 2, 0))
    '2F0'
    >>> Action(Kind.SEND_F, 3, 1).peer
    4
    >>> str(Action(Kind.SEND_F, 0, 1, peer=3))
    '0SEND_F1>3'
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.kind.has_microbatch != (self.microbatch is not None):
            need = "a" if self.kind.has_microbatch else "no"
            raise ScheduleError(
                f"{self.kind.text} takes {need} microbatch (got {self.microbatch})"
            )
        if not 0 <= self.stage < _TOO_MANY or not 0 <= (self.microbatch or 0) < _TOO_MANY:
            raise ScheduleError(
                "stages and microbatches must be numbered from 0 "
                f"(got {self.stage} and {self.microbatch})"
            )
        if self.kind.is_communication:
            if self.peer is None:
                object.__setattr__(self, "peer", chain_peer(self.kind, self.stage))
        elif self.peer is not None:
            raise ScheduleError(f"{self.kind.text} takes no peer (got {self.peer})")

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.text}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.peer is not None and self.peer != chain_peer(self.kind, self.stage):
            text += f">{self.peer}"
        return text


def chain_peer(kind: Kind, stage: int) -> int:
    """Return the stage at the other end of a communication, if stages form a chain."""
    return stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1


@dataclass(frozen=True, slots=True)
class Overlap:
    """Compute actions that run together: they start and end at the same time.

    >>> print(Overlap((Action(Kind.FORWARD, 0, 3), Action(Kind.FULL_BACKWARD, 7, 1))))
    (0F3;7B1)OVERLAP_F_B
    """

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if len(self.actions) < 2 or not all(action.kind.is_compute for action in self.actions):
            raise ScheduleError(f"an overlap must hold two or more compute actions (got {self})")

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))}){OVERLAP_TEXT}"


Work: TypeAlias = Action | Overlap
