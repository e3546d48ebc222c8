"""Who is lost, and who holds up the others, by what every rank has told of itself and when.

It opens no connection and reads no clock: whoever asks says what time it is.
"""

from collections.abc import Sequence

from penstock.alive.lost_rank import LostRank, ended, left, silent, unlinked
from penstock.alive.rank_status import NOWHERE, RankStatus
from penstock.alive.timeouts import Timeouts

__all__ = ["FailureDetector", "describe_stall"]

# How long a broken connection is looked at before it is blamed on itself: when it broke because a
# process at one end did, that is known by then.
_BREAK_SECONDS = 1.0


class FailureDetector:
    """Keeps what is known of every rank."""

    def __init__(self, num_ranks: int, watch: Timeouts, now: float) -> None:
        self._watch = watch
        self._places = [NOWHERE] * num_ranks
        self._heard = [now] * num_ranks
        self._broken: dict[int, float] = {}
        self._ended: list[int] = []
        self._left: dict[int, tuple[int, str]] = {}
        self._moved = now
        self._next_report = watch.stall_seconds

    @property
    def places(self) -> tuple[RankStatus, ...]:
        """Where every rank was when it last told."""
        return tuple(self._places)

    def hear(self, rank: int, place: RankStatus, now: float) -> None:
        """A rank tells where it is."""
        before = self._places[rank]
        if place.progress != before.progress or place.failure != before.failure:
            self._moved = now
            self._next_report = self._watch.stall_seconds
        if place.broken is None:
            self._broken.pop(rank, None)
        else:
            self._broken.setdefault(rank, now)
        self._places[rank], self._heard[rank] = place, now

    def end(self, rank: int) -> None:
        """The connection to a rank broke; after a goodbye that is as it should be."""
        if rank not in self._left:
            self._ended.append(rank)

    def leave(self, rank: int, calls: int, why: str) -> None:
        """A rank says goodbye, after so many calls."""
        self._left[rank] = calls, why

    def forgive(self, now: float) -> None:
        """Whoever asks has slept itself, so that it could hear nobody."""
        self._heard = [now] * len(self._heard)
        self._moved = now

    def find_lost(self, now: float) -> LostRank | None:
        """The rank that is lost, if one is."""
        for rank in self._ended:
            return ended(rank, self._places[rank])
        latest = max((place.call for place in self._places if place.is_inside), default=0)
        for rank, (calls, why) in self._left.items():
            if latest > calls:
                return left(rank, why, self._places[rank])
        silence = self._watch.silence_seconds
        for rank, heard in enumerate(self._heard):
            if rank not in self._left and now - heard >= silence:
                return silent(rank, silence, self._places[rank])
        for rank, since in self._broken.items():
            if now - since >= _BREAK_SECONDS:
                place = self._places[rank]
                return unlinked(rank, place.broken or "", place)
        return self._find_stuck(now)

    def _find_stuck(self, now: float) -> LostRank | None:
        """A rank that failed, while another does not come out of the same call."""
        patience = self._watch.stop_seconds
        if now - self._moved < patience:
            return None
        for rank, place in enumerate(self._places):
            stuck = [
                other
                for other, theirs in enumerate(self._places)
                if other != rank and theirs.is_inside and theirs.call == place.call
            ]
            if place.failure is not None and stuck:
                # Those that wait for another are not to blame, unless nobody else is.
                other = min(stuck, key=lambda rank: _is_waiting(self._places[rank]))
                doing = self._places[other].doing
                late = f"rank {other} did not come out of {doing} for {patience:g} s"
                return LostRank(rank, f"failed, and {late}: {place.failure}", None)
        return None

    def find_stall(self, now: float) -> str | None:
        """A report, if no rank has got on for long; again after twice as long."""
        seconds = now - self._moved
        if seconds < self._next_report or not any(place.is_inside for place in self._places):
            return None
        self._next_report *= 2
        return describe_stall(self._places, seconds)


def _is_waiting(place: RankStatus) -> bool:
    return place.waits_for is not None or place.is_meeting


def describe_stall(places: Sequence[RankStatus], seconds: float) -> str:
    """A table of what every rank does, under the name of the one that all others wait for."""
    idle = [rank for rank, place in enumerate(places) if not _is_waiting(place)]
    match idle:
        case []:
            blame = "every rank waits for another"
        case [rank]:
            blame = f"all others wait for rank {rank} in the end"
        case _:
            blame = f"the ranks {', '.join(map(str, idle))} wait for no other"
    rows = [("rank", "in", "since", "waits for"), *map(_row, range(len(places)), places)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"no rank has got on for {seconds:.0f} s; {blame}"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(rank: int, place: RankStatus) -> tuple[str, str, str, str]:
    if not place.is_inside or place.doing is None:
        return str(rank), "no step", "", ""
    waits = "all ranks" if place.is_meeting else ""
    if place.waits_for is not None:
        message = "" if place.awaited is None else f", {place.awaited}"
        waits = f"rank {place.waits_for}{message}"
    return str(rank), place.doing, f"{place.seconds:.0f} s", waits
