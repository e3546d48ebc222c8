"""What ranks of the heartbeat tree may say, checked field by field; the rest is a `ValueError`."""

from collections.abc import Iterator
from typing import Any

from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus

__all__ = ["is_fact", "read_lost", "read_statuses"]


def is_fact(words: list[Any], size: int) -> bool:
    """Return whether a message is something of one of `size` ranks that is passed up."""
    match words:
        case ["goodbye", int(rank), int(), str(), int(), list(values)]:
            RankStatus.from_values(values)
        case (
            ["joined", int(rank), str(), int(), int()]
            | ["record", int(rank), str()]
            | ["ended" | "silent", int(rank), int()]
            | ["heard", int(rank)]
        ):
            pass
        case _:
            return False
    _require(rank, size)
    return True


def read_statuses(entries: list[Any], size: int) -> Iterator[tuple[int, RankStatus]]:
    """Yield which of `size` ranks has which status."""
    for entry in entries:
        match entry:
            case [int(rank), list(values)]:
                _require(rank, size)
                yield rank, RankStatus.from_values(values)
            case _:
                raise ValueError(f"not the status of a rank: {entry!r:.200}")


def read_lost(values: list[Any], size: int) -> LostRank:
    """Return the lost one of `size` ranks."""
    lost = LostRank.from_values(values)
    _require(lost.rank, size)
    return lost


def _require(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"a rank must be below {size} (got {rank})")
