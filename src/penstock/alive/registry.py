"""What rank 0 knows of every rank, from what all of them pass up the heartbeat tree."""

from time import monotonic
from typing import Any

from penstock.alive.failure_detector import FailureDetector
from penstock.alive.member import Member
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts

__all__ = ["Registry"]


class Registry:
    """Members, flight records and the failure detector of all ranks.

    A rank that was connected anew has another rank above it: only that one may call it lost.
    """

    def __init__(self, me: Member, size: int, timeouts: Timeouts, now: float) -> None:
        self._size = size
        self.detector = FailureDetector(size, timeouts, now)
        self.detector.arrive(me.rank, me.pipeline, now)
        self.members = {me.rank: me}
        self.records: dict[int, str] = {}
        self._above: dict[int, int] = {}

    def take_status(self, rank: int, status: RankStatus) -> None:
        """Take the status of a rank."""
        self._require(rank)
        self.detector.update(rank, status, monotonic())

    def take_fact(self, words: list[Any]) -> None:
        """Take something that was passed up; anything else is a `ValueError`."""
        rank, now = words[1], monotonic()
        self._require(rank)
        match words:
            case ["joined", _, name, pipeline, above]:
                self.members[rank] = Member(rank, name, pipeline)
                self._above[rank] = above
                self.detector.arrive(rank, pipeline, now)
            case ["record", _, path]:
                self.records[rank] = path
            case ["ended", _, above]:
                if self._above.get(rank, above) == above:
                    self.detector.end(rank)
            case ["silent", _, above]:
                if self._above.get(rank, above) == above:
                    self.detector.fall_silent(rank)
            case ["goodbye", _, calls, reason, _, values]:
                self.detector.update(rank, RankStatus.from_values(values), now)
                self.detector.leave(rank, calls, reason)
            case _:
                raise ValueError(f"not a fact: {words[0]!r}")

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"a rank must be below {self._size} (got {rank})")
