"""What a rank knows of rank 0, about which every rank decides by itself."""

from penstock.alive.lost_rank import LostRank, left
from penstock.alive.rank_status import INITIAL_STATUS, RankStatus
from penstock.alive.timeouts import Timeouts

__all__ = ["RootView"]


class RootView:
    """The last status of rank 0, its flight record once it has one, and its goodbye."""

    def __init__(self) -> None:
        self.status = INITIAL_STATUS
        self.records: dict[int, str] = {}
        self._goodbye: tuple[int, str, int] | None = None

    @property
    def has_left(self) -> bool:
        """Whether rank 0 has said goodbye."""
        return self._goodbye is not None

    def leave(self, calls: int, reason: str, pipeline: int, status: RankStatus) -> None:
        """Note the goodbye of rank 0, which took part in this number of calls of its pipeline."""
        self.status, self._goodbye = status, (calls, reason, pipeline)

    def find_lost(self, pipeline: int, status: RankStatus, timeouts: Timeouts) -> LostRank | None:
        """Return rank 0 if it has left, and this rank waits for it or may not know in time."""
        if self._goodbye is None:
            return None
        calls, reason, theirs = self._goodbye
        if theirs == pipeline:
            is_missed = status.call > calls
        else:
            is_held = status.is_with_replicas and status.seconds >= timeouts.stop_seconds
            # In the middle of a call it takes the calls of all replicas along.
            is_missed = self.status.call > calls or is_held
        return left(0, reason, self.status) if status.is_inside and is_missed else None
