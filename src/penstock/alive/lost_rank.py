"""What became of a rank that others can no longer count on, in the words of the error."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from penstock.alive.rank_status import RankStatus

__all__ = ["LastOf", "LostRank", "ended", "left", "silent", "unlinked", "with_last"]

# What a rank did last by its flight record, as a part of a sentence, if that can be read.
LastOf: TypeAlias = Callable[[int], str | None]


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank is lost: what happened to it, and what it did last, if that is known.

    `is_quiet` says that what the rank had to do may all be done: others may still get to the end
    of the call that they are in, and are given a moment for that.
    """

    rank: int
    what: str
    last: str | None
    is_quiet: bool = False

    def to_values(self) -> list[Any]:
        """As plain values, in order."""
        return [self.rank, self.what, self.last, self.is_quiet]


def ended(rank: int, place: RankStatus) -> LostRank:
    """The process of a rank has gone without a word."""
    what = "ended (its connection broke)"
    if place.failure is not None:
        what = f"failed, and ended before all others knew: {place.failure}"
    return LostRank(rank, what, _last_heard(place), is_quiet=True)


def left(rank: int, why: str, place: RankStatus) -> LostRank:
    """A rank has said goodbye, and others go on."""
    return LostRank(rank, f"has left ({why})", _last_heard(place), is_quiet=True)


def silent(rank: int, seconds: float, place: RankStatus) -> LostRank:
    """A rank has been silent for so long."""
    return LostRank(rank, f"has stopped answering (for {seconds:g} s)", _last_heard(place))


def unlinked(rank: int, error: str, place: RankStatus) -> LostRank:
    """A rank lives, but cannot talk to another."""
    return LostRank(rank, f"lost its connection to another rank ({error})", _last_heard(place))


def with_last(verdict: LostRank, last_of: LastOf) -> LostRank:
    """With what the flight record tells, where there is one: it knows more than the last beat."""
    return replace(verdict, last=last_of(verdict.rank) or verdict.last)


def _last_heard(place: RankStatus) -> str | None:
    return None if place.doing is None else f"it was last heard of in {place.doing}"
