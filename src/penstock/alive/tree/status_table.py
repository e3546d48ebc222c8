"""The statuses of a rank and of those below it, of which only what has changed is passed up."""

from collections.abc import Iterator
from typing import Any

from penstock.alive.rank_status import RankStatus

__all__ = ["StatusTable"]

# A message carries at most this number of statuses.
_MOST_STATUSES = 200


class StatusTable:
    """The last status of every rank of a subtree."""

    def __init__(self) -> None:
        self._statuses: dict[int, RankStatus] = {}
        self._changed: set[int] = set()

    def take(self, rank: int, status: RankStatus) -> bool:
        """Keep the status of a rank; return whether it is another one than before."""
        is_new = self._statuses.get(rank) != status
        if is_new:
            self._statuses[rank] = status
            self._changed.add(rank)
        return is_new

    def touch(self, rank: int, status: RankStatus) -> None:
        """Keep a status, and pass it up whether or not it has changed."""
        self._statuses[rank] = status
        self._changed.add(rank)

    def forget_passed(self) -> None:
        """Pass everything up again, because another rank above knows none of it."""
        self._changed |= set(self._statuses)

    def take_changed(self) -> Iterator[list[Any]]:
        """Yield what has changed since the last time, as entries of one message each."""
        changed = [[rank, self._statuses[rank].to_values()] for rank in sorted(self._changed)]
        self._changed.clear()
        for first in range(0, len(changed), _MOST_STATUSES):
            yield changed[first : first + _MOST_STATUSES]
