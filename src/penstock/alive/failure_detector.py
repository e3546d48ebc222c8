"""Which rank is lost, and which one holds up the others, from what is known of every rank.

The failure detector opens no connection and reads no clock: its caller says what time it is. Rank
0 has one; with `Silence` every rank decides whether its neighbours in the tree answer.
"""

from collections.abc import Iterable

from penstock.alive.lost_rank import LostRank, absent, disconnected, ended, left, silent
from penstock.alive.rank_status import INITIAL_STATUS, RankStatus
from penstock.alive.stall import describe_stall, is_waiting
from penstock.alive.timeouts import Timeouts

__all__ = ["FailureDetector", "Silence"]

# How long a broken connection is observed before its rank is blamed: if it broke because a process
# at one end died, that is known by then.
_BREAK_SECONDS = 1.0


class Silence:
    """When each neighbour was last heard."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._heard: dict[int, float] = {}

    def hear(self, rank: int, now: float) -> None:
        """Note that a neighbour was heard."""
        self._heard[rank] = now

    def forget(self, rank: int) -> None:
        """Expect nothing more of a neighbour."""
        self._heard.pop(rank, None)

    def restart(self, now: float) -> None:
        """Forget past silence, because the caller was asleep and could hear nobody."""
        self._heard = dict.fromkeys(self._heard, now)

    def lasts(self, rank: int, now: float) -> float:
        """Return for how long a neighbour was not heard."""
        return now - self._heard.get(rank, now)

    def is_short(self, rank: int, now: float) -> bool:
        """Return whether a neighbour was heard in the last half of the limit."""
        heard = self._heard.get(rank)
        return heard is not None and now - heard < self.seconds / 2

    def find(self, now: float) -> Iterable[int]:
        """Return the neighbours that were not heard for too long."""
        return [rank for rank, heard in self._heard.items() if now - heard >= self.seconds]


class FailureDetector:
    """The last known status of every rank, and what follows from it.

    Ranks belong to one pipeline or to several that are replicas of one another. Those of one
    pipeline make the same calls; what others do matters where all do something together.
    """

    def __init__(self, num_ranks: int, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._begin = now
        self._statuses = [INITIAL_STATUS] * num_ranks
        self._pipelines: dict[int, int] = {}
        self._progress: dict[int, float] = {}
        self._broken_since: dict[int, float] = {}
        self._ended: list[int] = []
        self._silent: list[int] = []
        self._left: dict[int, tuple[int, str]] = {}
        self._next_report = timeouts.stall_seconds

    @property
    def statuses(self) -> tuple[RankStatus, ...]:
        """The last known status of every rank."""
        return tuple(self._statuses)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has come."""
        return len(self._pipelines) == len(self._statuses)

    @property
    def gone(self) -> set[int]:
        """The ranks that have ended, do not answer or have left."""
        return {*self._ended, *self._silent, *self._left}

    def arrive(self, rank: int, pipeline: int, now: float) -> None:
        """Note that a rank has come, and to which pipeline it belongs."""
        self._pipelines[rank] = pipeline
        self._progress[pipeline] = now

    def update(self, rank: int, status: RankStatus, now: float) -> None:
        """Take the status that a rank has sent."""
        before = self._statuses[rank]
        if status.progress != before.progress or status.failure != before.failure:
            self._progress[self._pipelines.get(rank, 0)] = now
            self._next_report = self._timeouts.stall_seconds
        if status.broken is None:
            self._broken_since.pop(rank, None)
        else:
            self._broken_since.setdefault(rank, now)
        self._statuses[rank] = status

    def end(self, rank: int) -> None:
        """Note that the connection to a rank broke, which is expected after its goodbye."""
        if rank not in self._left:
            self._ended.append(rank)

    def fall_silent(self, rank: int) -> None:
        """Note that a rank was not heard for too long, which is expected after its goodbye."""
        if rank not in self._left:
            self._silent.append(rank)

    def leave(self, rank: int, calls: int, reason: str) -> None:
        """Note the goodbye of a rank that took part in this number of calls."""
        self._left[rank] = calls, reason

    def restart_clocks(self, now: float) -> None:
        """Forget past waiting, because the caller was asleep and could hear nobody."""
        self._progress = dict.fromkeys(self._progress, now)
        self._begin = now

    def find_lost(self, now: float) -> LostRank | None:
        """Return the rank that is lost, if one is."""
        for rank in self._ended:
            return ended(rank, self._statuses[rank])
        for rank in self._silent:
            return silent(rank, self._timeouts.silence_seconds, self._statuses[rank])
        missing = [rank for rank in range(len(self._statuses)) if rank not in self._pipelines]
        if missing and now - self._begin >= self._timeouts.join_seconds:
            return absent(missing[0], self._timeouts.join_seconds)
        for rank, (calls, reason) in self._left.items():
            if self._is_missed(rank, calls, now):
                return left(rank, reason, self._statuses[rank])
        for rank, since in self._broken_since.items():
            if now - since >= _BREAK_SECONDS:
                return self._explain_break(rank)
        return self._find_stuck(now)

    def _explain_break(self, rank: int) -> LostRank:
        """Return who is to blame for a connection that broke on this rank."""
        status = self._statuses[rank]
        for gone in self._left:
            theirs = self._statuses[gone]
            # Those of other pipelines make other numbers of calls.
            is_same_call = theirs.call == status.call or not self._is_one_pipeline(rank, gone)
            if theirs.failure is not None and is_same_call:
                return ended(gone, theirs)
        return disconnected(rank, status.broken or "", status)

    def _is_missed(self, gone: int, calls: int, now: float) -> bool:
        """Return whether a rank waits for one that has left after this number of calls."""
        theirs = self._statuses[gone]
        return any(
            status.call > calls
            if self._is_one_pipeline(rank, gone)
            else theirs.call > calls or _has_broken(status, theirs) or self._is_held(rank, now)
            for rank, status in enumerate(self._statuses)
            if status.is_inside
        )

    def _find_stuck(self, now: float) -> LostRank | None:
        """Return a rank that failed while another does not leave what both do."""
        for rank, status in enumerate(self._statuses):
            if status.failure is None:
                continue
            stuck = [
                other
                for other, theirs in enumerate(self._statuses)
                if other != rank and theirs.is_inside and self._is_stuck(rank, other, now)
            ]
            if stuck:
                # Ranks that wait for another are not to blame, unless all of them do.
                other = min(stuck, key=lambda rank: is_waiting(self._statuses[rank]))
                doing = self._statuses[other].doing
                late = f"rank {other} did not leave {doing} within "
                late += f"{self._timeouts.stop_seconds:g} s"
                return LostRank(rank, f"failed, and {late}: {status.failure}", None)
        return None

    def _is_stuck(self, failed: int, rank: int, now: float) -> bool:
        if not self._is_one_pipeline(failed, rank):
            return self._is_held(rank, now)
        is_same_call = self._statuses[rank].call == self._statuses[failed].call
        return is_same_call and self._is_standing(rank, now)

    def _is_held(self, rank: int, now: float) -> bool:
        """Return whether a rank waits in something that replicas do together."""
        return self._statuses[rank].is_with_replicas and self._is_standing(rank, now)

    def _is_standing(self, rank: int, now: float) -> bool:
        """Return whether the pipeline of a rank has made no progress for `stop_seconds`."""
        last = self._progress.get(self._pipelines.get(rank, 0), self._begin)
        return now - last >= self._timeouts.stop_seconds

    def _is_one_pipeline(self, rank: int, other: int) -> bool:
        return self._pipelines.get(rank) == self._pipelines.get(other)

    def find_stall(self, now: float) -> str | None:
        """Return a report if no rank made progress for long; again after twice as long."""
        seconds = now - max(self._progress.values(), default=self._begin)
        is_inside = any(status.is_inside for status in self._statuses)
        if seconds < self._next_report or not is_inside:
            return None
        self._next_report *= 2
        return describe_stall(self._statuses, seconds)


def _has_broken(status: RankStatus, gone: RankStatus) -> bool:
    """Return whether what failed with replicas did so because one of them had failed and left."""
    has_failed = status.is_with_replicas and status.failure is not None
    return has_failed and gone.failure is not None
