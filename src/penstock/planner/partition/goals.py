"""What a search makes small, and how small it can still become.

A goal folds the stages and ranks that have their pieces into one number. Its bound says what that
number will be at least, however the gaps that are left get filled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.partition.chain import UNLIMITED, Chain, Longs, Room, add_up
from penstock.planner.partition.front import Front
from penstock.planner.partition.steps import Ahead, Gap, Way

__all__ = ["Evenness", "Excess", "Goal", "SlowestRank"]

# How many numbers are worked on at once while tables are made.
_MOST_CELLS = 1 << 17
# What a byte is worth on the rank where it is worth most; few enough to be added up.
_MOST_WORTH = 1 << 12


class Goal(Protocol):
    """A number to make small, for every state of a search at once."""

    @property
    def start(self) -> int:
        """The value of nothing at all."""
        ...

    def add(self, front: Front, ticks: Longs) -> Longs:
        """The values with one more stage of this many ticks."""
        ...

    def close(self, front: Front, rank: int) -> Longs:
        """The values with the rank at hand complete."""
        ...

    def bound(self, front: Front, ahead: Ahead) -> Longs:
        """The least that the values can become."""
        ...

    def guess(self, front: Front, ahead: Ahead) -> Floats:
        """Which of the states with equal bounds to try first: those with the least numbers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SlowestRank:
    """The ticks of the slowest rank, which are no less than `floor`."""

    ticks: Longs
    least_ticks: Longs
    floor: int
    start: int = 0

    def add(self, front: Front, ticks: Longs) -> Longs:  # noqa: ARG002  (a stage alone is no rank)
        """A stage counts when its rank is complete."""
        return front.value

    def close(self, front: Front, rank: int) -> Longs:  # noqa: ARG002  (all ranks count alike)
        """The larger of the value and the rank at hand."""
        return np.maximum(front.value, front.ticks)

    def bound(self, front: Front, ahead: Ahead) -> Longs:
        """The rank at hand, or the mean of what is left over the ranks that have to take it."""
        least: Longs = np.maximum(front.value, self.floor)
        if not ahead.ranks:
            return least
        left = front.ticks + _count_left(self.ticks, front, ahead)
        mean: Longs = -(-left // len(ahead.ranks))
        at_hand = front.ticks + int(self.least_ticks[list(ahead.later_stages)].sum())
        return np.maximum(np.maximum(least, mean), at_hand)

    def guess(self, front: Front, ahead: Ahead) -> Floats:
        """How even the stages can be made."""
        return _guess_squares(self.ticks, front, ahead)


@dataclass(frozen=True, slots=True, eq=False)
class Excess:
    """How far the fullest rank is above its cap of bytes, or `floor` if that is more.

    A byte has another worth on each rank, so that a piece is worth about the same on all, however
    many microbatches they have in flight: `worth[k]` counts the first pieces at the least that
    they are worth on any of the last k ranks of the way.
    """

    caps: tuple[int, ...]
    byte_worth: tuple[int, ...]
    worth: Longs
    least_bytes: Longs
    floor: int

    @classmethod
    def of(
        cls, chain: Chain, caps: tuple[int, ...], room: Room, way: Way, *, floor: int
    ) -> "Excess":
        """Prepare the bounds for these caps."""
        taken, placement = np.diff(chain.bytes, axis=1), chain.placement
        ranks = range(placement.num_ranks)
        least = np.array([taken[list(placement.stages(rank))].min(axis=0) for rank in ranks])
        mean = np.maximum(least.mean(axis=1), 1.0)
        byte_worth = np.maximum(np.rint(_MOST_WORTH * mean.min() / mean), 1).astype(np.int64)
        from_last = (byte_worth[:, None] * least)[list(way.ranks[::-1])]
        worth = np.minimum.accumulate(np.concatenate((from_last[:1], from_last)))
        return cls(caps, tuple(byte_worth.tolist()), add_up(worth), room.least_bytes, floor)

    @property
    def start(self) -> int:
        """The value of nothing at all."""
        return self.floor

    def add(self, front: Front, ticks: Longs) -> Longs:  # noqa: ARG002  (a stage alone is no rank)
        """A stage counts when its rank is complete."""
        return front.value

    def close(self, front: Front, rank: int) -> Longs:
        """The larger of the value and the rank at hand."""
        return np.maximum(front.value, front.bytes - self.caps[rank])

    def bound(self, front: Front, ahead: Ahead) -> Longs:
        """The rank at hand, or what is left when all ranks that have to take it are as full."""
        if not ahead.ranks:
            return front.value
        left = _count_left(self.worth[len(ahead.ranks)], front, ahead)
        left = left + front.bytes * self.byte_worth[ahead.ranks[0]]
        room = sum(self.byte_worth[rank] * self.caps[rank] for rank in ahead.ranks)
        each = sum(self.byte_worth[rank] for rank in ahead.ranks)
        mean = -((min(room, UNLIMITED) - left) // each)
        at_hand = front.bytes + int(self.least_bytes[list(ahead.later_stages)].sum())
        return np.maximum(np.maximum(front.value, mean), at_hand - self.caps[ahead.ranks[0]])

    def guess(self, front: Front, ahead: Ahead) -> Floats:
        """How much is left."""
        return _count_left(self.worth[len(ahead.ranks)], front, ahead).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Evenness:
    """The sum of the squares of the stages' ticks: the smaller, the more even.

    `tables[begin, end]` holds the least sum of a gap that is cut without regard to what its ranks
    hold elsewhere, with a row per place of the one cut and a column per place of the other.
    """

    tables: Mapping[Gap, Longs]
    lowest: Longs
    ticks: Longs
    start: int = 0

    @classmethod
    def of(cls, chain: Chain, room: Room, way: Way) -> "Evenness":
        """Prepare the bounds of all gaps on the way."""
        begins: dict[int, int] = {}
        for begin, end in way.gaps:
            begins[end] = min(begin, begins.get(end, begin))
        tables: dict[Gap, Longs] = {}
        for end, begin in begins.items():
            num_places = room.highest[end] - room.lowest[end] + 1
            table = np.where(np.eye(num_places, dtype=np.bool_), 0, UNLIMITED)
            for stage in reversed(range(begin, end)):
                table = tables[stage, end] = _put_before(table, chain, room, stage)
        return cls(tables, room.lowest, chain.ticks)

    def add(self, front: Front, ticks: Longs) -> Longs:
        """The values with the square of one more stage."""
        return front.value + ticks * ticks

    def close(self, front: Front, rank: int) -> Longs:  # noqa: ARG002  (stages count, not ranks)
        """Ranks do not count."""
        return front.value

    def bound(self, front: Front, ahead: Ahead) -> Longs:
        """The values with every gap cut most evenly."""
        value = front.value
        for begin, end in ahead.gaps:
            row = front.cuts[begin] - self.lowest[begin]
            column = front.cuts[end] - self.lowest[end]
            value = np.minimum(value + self.tables[begin, end][row, column], UNLIMITED)
        return value

    def guess(self, front: Front, ahead: Ahead) -> Floats:
        """How even the stages can be made."""
        return _guess_squares(self.ticks, front, ahead)


def _count_left(total: Longs, front: Front, ahead: Ahead) -> Longs:
    """What the pieces in all gaps come to, by the sums of the first pieces."""
    parts = (total[front.cuts[end]] - total[front.cuts[begin]] for begin, end in ahead.gaps)
    return sum(parts, np.zeros(len(front), dtype=np.int64))


def _guess_squares(ticks: Longs, front: Front, ahead: Ahead) -> Floats:
    """The sum of the squares of all stages, if the gaps could be cut at any place."""
    guess = front.spread
    for begin, end in ahead.gaps:
        left = ticks[front.cuts[end]] - ticks[front.cuts[begin]]
        guess = guess + np.square(left, dtype=np.float64) / (end - begin)
    return guess


def _put_before(table: Longs, chain: Chain, room: Room, stage: int) -> Longs:
    """The table of a gap that begins one stage earlier."""
    begin = np.arange(room.lowest[stage], room.highest[stage] + 1)[:, None]
    end = np.arange(room.lowest[stage + 1], room.highest[stage + 1] + 1)[None, :]
    squares = (chain.ticks[end] - chain.ticks[begin]) ** 2
    squares[(end <= begin) | (end > room.last[stage, begin])] = UNLIMITED
    rows = max(1, _MOST_CELLS // table.size)
    parts = [
        (squares[row : row + rows, :, None] + table[None]).min(axis=1)
        for row in range(0, len(squares), rows)
    ]
    joined: Longs = np.minimum(np.concatenate(parts), UNLIMITED)
    return joined
