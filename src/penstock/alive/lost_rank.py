"""What happened to a rank that the others can no longer count on, in the words of the error."""

from dataclasses import astuple, dataclass, replace
from typing import Any

from penstock.alive.rank_status import RankStatus
from penstock.alive.tree.member import Member

__all__ = [
    "LostRank",
    "absent",
    "cut_off",
    "disconnected",
    "ended",
    "left",
    "silent",
]


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank that is lost: what happened to it, and what it did last, if that is known.

    `may_be_done` says that the rank may have done its whole part of the current call. The others
    then get a moment to finish that call. `name` is its process and machine.
    """

    rank: int
    what: str
    last: str | None
    may_be_done: bool = False
    name: str = ""

    def to_values(self) -> list[Any]:
        """Return the fields as plain values, in order."""
        return list(astuple(self))

    def named(self, member: Member | None) -> "LostRank":
        """Return the same with the name of its rank, if that is known."""
        return self if member is None else replace(self, name=member.name)

    @classmethod
    def from_values(cls, values: list[Any]) -> "LostRank":
        """Return the lost rank of plain values; any others are a `ValueError`."""
        match values:
            case [int(rank), str(what), str() | None as last, bool(may_be_done), str(name)]:
                return cls(rank, what, last, may_be_done, name)
        raise ValueError(f"not a lost rank: {values!r:.200}")


def ended(rank: int, status: RankStatus) -> LostRank:
    """Return a rank whose process ended without a goodbye."""
    what = "ended (its connection broke)"
    if status.failure is not None:
        what = f"failed, and ended before all ranks knew: {status.failure}"
    return LostRank(rank, what, _last_seen(status), may_be_done=True)


def left(rank: int, reason: str, status: RankStatus) -> LostRank:
    """Return a rank that said goodbye while others continue."""
    what = f"has left ({reason})"
    if status.failure is not None:
        what = f"failed, and {what}: {status.failure}"
    return LostRank(rank, what, _last_seen(status), may_be_done=True)


def silent(rank: int, seconds: float, status: RankStatus) -> LostRank:
    """Return a rank that has been silent for too long."""
    return LostRank(rank, f"has not answered for {seconds:g} s", _last_seen(status))


def absent(rank: int, seconds: float) -> LostRank:
    """Return a rank that never came to open the pipeline."""
    return LostRank(rank, f"has not come to build its pipeline within {seconds:g} s", None)


def cut_off(rank: int, error: str, status: RankStatus) -> LostRank:
    """Return a rank that can reach no other one, which is what the others notice of it."""
    return LostRank(rank, f"cannot reach any other rank ({error})", _last_seen(status))


def disconnected(rank: int, error: str, status: RankStatus) -> LostRank:
    """Return a rank that is alive but cannot reach another one."""
    return LostRank(rank, f"lost its connection to another rank ({error})", _last_seen(status))


def _last_seen(status: RankStatus) -> str | None:
    return None if status.doing is None else f"it was last seen in {status.doing}"
