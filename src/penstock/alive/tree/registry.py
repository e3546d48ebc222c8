"""What rank 0 knows of every rank, from what all of them pass up the heartbeat tree."""

from logging import getLogger
from time import monotonic
from typing import Any

from penstock.alive.failure_detector import FailureDetector
from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.member import Member

__all__ = ["Registry"]

_LOGGER = getLogger(__name__)


class Registry:
    """Members, flight records and the failure detector of all ranks.

    A rank that has connected again has another rank above it: only that one may call it lost.
    """

    def __init__(self, me: Member, size: int, timeouts: Timeouts, now: float) -> None:
        self.detector = FailureDetector(size, timeouts, now)
        self.detector.arrive(me.rank, me.pipeline, now)
        self.members = {me.rank: me}
        self.records: dict[int, str] = {}
        self._above: dict[int, int] = {}
        self._informed = {me.rank}

    def take_status(self, rank: int, status: RankStatus) -> None:
        """Take the status of a rank."""
        self.detector.update(rank, status, monotonic())

    def find_lost(self, status: RankStatus, now: float) -> LostRank | None:
        """Return the rank that is lost by now, if one is; a stalled step goes to the log."""
        self.detector.update(0, status, now)
        lost = self.detector.find_lost(now)
        if lost is None and (report := self.detector.find_stall(now)) is not None:
            _LOGGER.warning("%s", report)
        return lost

    def take_fact(self, words: list[Any]) -> None:
        """Take something that was passed up (`messages.is_fact`)."""
        rank, now = words[1], monotonic()
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
