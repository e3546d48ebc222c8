"""Which rank is lost, and which one holds up the others, from the status of every rank.

The failure detector opens no connection and reads no clock: its caller says what time it is.
"""

from collections.abc import Sequence

from penstock.alive.lost_rank import LostRank, disconnected, ended, left, silent
from penstock.alive.rank_status import INITIAL_STATUS, RankStatus
from penstock.alive.timeouts import Timeouts

__all__ = ["FailureDetector", "describe_stall"]

# How long a broken connection is observed before its rank is blamed: if it broke because a process
# at one end died, that is known by then.
_BREAK_SECONDS = 1.0


class FailureDetector:
    """The last known status of every rank, and what follows from it."""

    def __init__(self, num_ranks: int, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._statuses = [INITIAL_STATUS] * num_ranks
        self._last_heard = [now] * num_ranks
        self._broken_since: dict[int, float] = {}
        self._ended: list[int] = []
        self._left: dict[int, tuple[int, str]] = {}
        self._last_progress = now
        self._next_report = timeouts.stall_seconds

    @property
    def statuses(self) -> tuple[RankStatus, ...]:
        """The last known status of every rank."""
        return tuple(self._statuses)

    def update(self, rank: int, status: RankStatus, now: float) -> None:
        """Take the status that a rank has sent."""
        before = self._statuses[rank]
        if status.progress != before.progress or status.failure != before.failure:
            self._last_progress = now
            self._next_report = self._timeouts.stall_seconds
        if status.broken is None:
            self._broken_since.pop(rank, None)
        else:
            self._broken_since.setdefault(rank, now)
        self._statuses[rank], self._last_heard[rank] = status, now

    def end(self, rank: int) -> None:
        """Note that the connection to a rank broke, which is expected after its goodbye."""
        if rank not in self._left:
            self._ended.append(rank)

    def leave(self, rank: int, calls: int, reason: str) -> None:
        """Note the goodbye of a rank that took part in this number of calls."""
        self._left[rank] = calls, reason

    def restart_clocks(self, now: float) -> None:
        """Forget past silence, because the caller was asleep and could hear nobody."""
        self._last_heard = [now] * len(self._last_heard)
        self._last_progress = now

    def find_lost(self, now: float) -> LostRank | None:
        """Return the rank that is lost, if one is."""
        for rank in self._ended:
            return ended(rank, self._statuses[rank])
        latest = max((status.call for status in self._statuses if status.is_inside), default=0)
        for rank, (calls, reason) in self._left.items():
            if latest > calls:
                return left(rank, reason, self._statuses[rank])
        silence = self._timeouts.silence_seconds
        for rank, heard in enumerate(self._last_heard):
            if rank not in self._left and now - heard >= silence:
                return silent(rank, silence, self._statuses[rank])
        for rank, since in self._broken_since.items():
            if now - since >= _BREAK_SECONDS:
                status = self._statuses[rank]
                return disconnected(rank, status.broken or "", status)
        return self._find_stuck(now)

    def _find_stuck(self, now: float) -> LostRank | None:
        """Return a rank that failed while another does not leave the same call."""
        limit = self._timeouts.stop_seconds
        if now - self._last_progress < limit:
            return None
        for rank, status in enumerate(self._statuses):
            stuck = [
                other
                for other, theirs in enumerate(self._statuses)
                if other != rank and theirs.is_inside and theirs.call == status.call
            ]
            if status.failure is not None and stuck:
                # Ranks that wait for another are not to blame, unless all of them do.
                other = min(stuck, key=lambda rank: _is_waiting(self._statuses[rank]))
                doing = self._statuses[other].doing
                late = f"rank {other} did not leave {doing} within {limit:g} s"
                return LostRank(rank, f"failed, and {late}: {status.failure}", None)
        return None

    def find_stall(self, now: float) -> str | None:
        """Return a report if no rank made progress for long; again after twice as long."""
        seconds = now - self._last_progress
        is_inside = any(status.is_inside for status in self._statuses)
        if seconds < self._next_report or not is_inside:
            return None
        self._next_report *= 2
        return describe_stall(self._statuses, seconds)


def _is_waiting(status: RankStatus) -> bool:
    return status.waits_for is not None or status.is_meeting


def describe_stall(statuses: Sequence[RankStatus], seconds: float) -> str:
    """Return a table of what every rank does, below the rank that all others wait for."""
    busy = [rank for rank, status in enumerate(statuses) if not _is_waiting(status)]
    match busy:
        case []:
            blame = "every rank is waiting for another"
        case [rank]:
            blame = f"all ranks are waiting for rank {rank}"
        case _:
            blame = f"ranks {', '.join(map(str, busy))} are not waiting for another"
    rows = [("rank", "in", "for", "waits for"), *map(_row, range(len(statuses)), statuses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"no progress for {seconds:.0f} s; {blame}"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(rank: int, status: RankStatus) -> tuple[str, str, str, str]:
    if not status.is_inside or status.doing is None:
        return str(rank), "no step", "", ""
    waits = "all ranks" if status.is_meeting else ""
    if status.waits_for is not None:
        message = "" if status.awaited is None else f", {status.awaited}"
        waits = f"rank {status.waits_for}{message}"
    return str(rank), status.doing, f"{status.seconds:.0f} s", waits
