"""What rank 0 knows of every rank, from what all of them pass up the heartbeat tree."""

from logging import getLogger
from time import monotonic
from typing import Any

from penstock.alive.failure_detector import FailureDetector
from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.member import Member

__all__ = ["Registry", "is_fact"]

_LOGGER = getLogger(__name__)


def is_fact(words: list[Any]) -> bool:
    """Return whether a message is something of a rank that is passed up."""
    match words:
        case ["goodbye", int(), int(), str(), int(), list(values)]:
            RankStatus.from_values(values)
            return True
        case (
            ["joined", int(), str(), int(), int()]
            | ["record", int(), str()]
            | ["ended" | "silent", int(), int()]
            | ["heard", int()]
        ):
            return True
    return False


class Registry:
    """Members, flight records and the failure detector of all ranks.

    A rank that has connected again has another rank above it: only that one may call it lost.
    """

    def __init__(self, me: Member, size: int, timeouts: Timeouts, now: float) -> None:
        self._size = size
        self.detector = FailureDetector(size, timeouts, now)
        self.detector.arrive(me.rank, me.pipeline, now)
        self.members = {me.rank: me}
        self.records: dict[int, str] = {}
        self._above: dict[int, int] = {}
        self._informed = {me.rank}

    def take_status(self, rank: int, status: RankStatus) -> None:
        """Take the status of a rank."""
        self._require(rank)
        self.detector.update(rank, status, monotonic())

    def find_lost(self, status: RankStatus, now: float) -> LostRank | None:
        """Return the rank that is lost by now, if one is; a stalled step goes to the log."""
        self.detector.update(0, status, now)
        lost = self.detector.find_lost(now)
        if lost is None and (report := self.detector.find_stall(now)) is not None:
            _LOGGER.warning("%s", report)
        return lost

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
            case ["heard", _]:
                self._informed.add(rank)
            case ["goodbye", _, calls, reason, _, values]:
                self.detector.update(rank, RankStatus.from_values(values), now)
                self.detector.leave(rank, calls, reason)
            case _:
                raise ValueError(f"not a fact: {words[0]!r}")

    def is_known_to_all(self, lost: int) -> bool:
        """Return whether all ranks that have come and are not gone have heard who is lost."""
        return self.members.keys() - self._informed - self.detector.gone <= {lost}

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"a rank must be below {self._size} (got {rank})")
