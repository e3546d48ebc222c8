"""What happened to a rank that the others can no longer count on, in the words of the error."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.alive.rank_status import RankStatus

__all__ = [
    "LastActionOf",
    "LostRank",
    "disconnected",
    "ended",
    "left",
    "silent",
    "with_last_action",
]

# Returns what a rank did last by its flight record, as a part of a sentence, if that can be read.
LastActionOf: TypeAlias = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that is lost: what happened to it, and what it did last, if that is known.

    `may_be_done` says that the rank may have done its whole part of the current call. The others
    then get a moment to finish that call.
    """

    rank: int
    what: str
    last: str | None
    may_be_done: bool = False

    def to_values(self) -> list[Any]:
        """Return the fields as plain values, in order."""
        return [self.rank, self.what, self.last, self.may_be_done]


def ended(rank: int, status: RankStatus) -> LostRank:
    """Return a rank whose process ended without a goodbye."""
    what = "ended (its connection broke)"
    if status.failure is not None:
        what = f"failed, and ended before all ranks knew: {status.failure}"
    return LostRank(rank, what, _last_seen(status), may_be_done=True)


def left(rank: int, reason: str, status: RankStatus) -> LostRank:
    """Return a rank that said goodbye while others continue."""
    return LostRank(rank, f"has left ({reason})", _last_seen(status), may_be_done=True)


def silent(rank: int, seconds: float, status: RankStatus) -> LostRank:
    """Return a rank that has been silent for too long."""
    return LostRank(rank, f"has not answered for {seconds:g} s", _last_seen(status))


def disconnected(rank: int, error: str, status: RankStatus) -> LostRank:
    """Return a rank that is alive but cannot reach another one."""
    return LostRank(rank, f"lost its connection to another rank ({error})", _last_seen(status))


def with_last_action(lost: LostRank, last_action_of: LastActionOf) -> LostRank:
    """Return a lost rank with what its flight record says, which is newer than its last beat."""
    return replace(lost, last=last_action_of(lost.rank) or lost.last)


def _last_seen(status: RankStatus) -> str | None:
    return None if status.doing is None else f"it was last seen in {status.doing}"
