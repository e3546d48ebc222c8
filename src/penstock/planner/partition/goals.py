"""Goals of a search: a number to minimise, and a bound on how small it can still become.

A goal folds the stages and ranks that have their pieces into one number. Its bound says what that
number will be at least, however the gaps that are left get filled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.partition.chain import UNLIMITED, Chain, CutRanges, Longs, add_up
from penstock.planner.partition.frontier import Frontier
from penstock.planner.partition.steps import Ahead, CutSequence, Gap

__all__ = ["Evenness", "Excess", "Goal", "SlowestRank"]

# The number of cells computed at once while tables are made.
_MOST_CELLS = 1 << 17
# What a byte is worth on the rank where it is worth most; few enough to be added up.
_MOST_WORTH = 1 << 12


class Goal(Protocol):
    """A number to make small, for every state of a search at once."""

    @property
    def start(self) -> int:
        """The value before the first stage."""
        ...

    def add(self, frontier: Frontier, ticks: Longs) -> Longs:
        """Return the values with one more stage of this many ticks."""
        ...

    def close(self, frontier: Frontier, rank: int) -> Longs:
        """Return the values with the current rank complete."""
        ...

    def bound(self, frontier: Frontier, ahead: Ahead) -> Longs:
        """Return the least that the values can become."""
        ...

    def guess(self, frontier: Frontier, ahead: Ahead) -> Floats:
        """Return a priority for states with equal bounds: the least numbers are tried first."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SlowestRank:
    """The ticks of the slowest rank, which are at least `floor`."""

    ticks: Longs
    least_ticks: Longs
    floor: int
    start: int = 0

    def add(self, frontier: Frontier, ticks: Longs) -> Longs:  # noqa: ARG002  (a stage alone does not count)
        """Return the values unchanged: a stage counts when its rank is complete."""
        return frontier.value

    def close(self, frontier: Frontier, rank: int) -> Longs:  # noqa: ARG002  (all ranks count alike)
        """Return the larger of the value and the current rank."""
        return np.maximum(frontier.value, frontier.ticks)

    def bound(self, frontier: Frontier, ahead: Ahead) -> Longs:
        """Return the current rank, or the mean of what is left over the remaining ranks."""
        least: Longs = np.maximum(frontier.value, self.floor)
        if not ahead.ranks:
            return least
        left = frontier.ticks + _count_left(self.ticks, frontier, ahead)
        mean: Longs = -(-left // len(ahead.ranks))
        at_hand = frontier.ticks + int(self.least_ticks[list(ahead.later_stages)].sum())
        return np.maximum(np.maximum(least, mean), at_hand)

    def guess(self, frontier: Frontier, ahead: Ahead) -> Floats:
        """Return how even the stages can be made."""
        return _guess_squares(self.ticks, frontier, ahead)


@dataclass(frozen=True, slots=True, eq=False)
class Excess:
    """How far the fullest rank is above its cap of bytes, or `floor` if that is more.

    A byte has another worth on each rank, so that a piece is worth about the same on all, however
    many microbatches they have in flight: `worth[k]` counts the first pieces at the least that
    they are worth on any of the last k ranks of the sequence.
    """

    caps: tuple[int, ...]
    byte_worth: tuple[int, ...]
    worth: Longs
    least_bytes: Longs
    floor: int

    @classmethod
    def of(
        cls,
        chain: Chain,
        caps: tuple[int, ...],
        ranges: CutRanges,
        sequence: CutSequence,
        *,
        floor: int,
    ) -> "Excess":
        """Prepare the bounds for these caps."""
        taken, placement = np.diff(chain.bytes, axis=1), chain.placement
        ranks = range(placement.num_ranks)
        least = np.array([taken[list(placement.stages(rank))].min(axis=0) for rank in ranks])
        mean = np.maximum(least.mean(axis=1), 1.0)
        byte_worth = np.maximum(np.rint(_MOST_WORTH * mean.min() / mean), 1).astype(np.int64)
        from_last = (byte_worth[:, None] * least)[list(sequence.ranks[::-1])]
        worth = np.minimum.accumulate(np.concatenate((from_last[:1], from_last)))
        return cls(caps, tuple(byte_worth.tolist()), add_up(worth), ranges.least_bytes, floor)

    @property
    def start(self) -> int:
        """The value before the first stage."""
        return self.floor

    def add(self, frontier: Frontier, ticks: Longs) -> Longs:  # noqa: ARG002  (a stage alone does not count)
        """Return the values unchanged: a stage counts when its rank is complete."""
        return frontier.value

    def close(self, frontier: Frontier, rank: int) -> Longs:
        """Return the larger of the value and the current rank."""
        return np.maximum(frontier.value, frontier.bytes - self.caps[rank])

    def bound(self, frontier: Frontier, ahead: Ahead) -> Longs:
        """Return the current rank, or the rest if all remaining ranks are equally full."""
        if not ahead.ranks:
            return frontier.value
        left = _count_left(self.worth[len(ahead.ranks)], frontier, ahead)
        left = left + frontier.bytes * self.byte_worth[ahead.ranks[0]]
        ranges = sum(self.byte_worth[rank] * self.caps[rank] for rank in ahead.ranks)
        each = sum(self.byte_worth[rank] for rank in ahead.ranks)
        mean = -((min(ranges, UNLIMITED) - left) // each)
        at_hand = frontier.bytes + int(self.least_bytes[list(ahead.later_stages)].sum())
        return np.maximum(np.maximum(frontier.value, mean), at_hand - self.caps[ahead.ranks[0]])

    def guess(self, frontier: Frontier, ahead: Ahead) -> Floats:
        """Return how much is left."""
        return _count_left(self.worth[len(ahead.ranks)], frontier, ahead).astype(np.float64)


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
    def of(cls, chain: Chain, ranges: CutRanges, sequence: CutSequence) -> "Evenness":
        """Prepare the bounds of all gaps on the sequence."""
        begins: dict[int, int] = {}
        for begin, end in sequence.gaps:
            begins[end] = min(begin, begins.get(end, begin))
        tables: dict[Gap, Longs] = {}
        for end, begin in begins.items():
            num_places = ranges.highest[end] - ranges.lowest[end] + 1
            table = np.where(np.eye(num_places, dtype=np.bool_), 0, UNLIMITED)
            for stage in reversed(range(begin, end)):
                table = tables[stage, end] = _put_before(table, chain, ranges, stage)
        return cls(tables, ranges.lowest, chain.ticks)

    def add(self, frontier: Frontier, ticks: Longs) -> Longs:
        """Return the values with the square of one more stage."""
        return frontier.value + ticks * ticks

    def close(self, frontier: Frontier, rank: int) -> Longs:  # noqa: ARG002  (stages count, not ranks)
        """Return the values unchanged: ranks do not count."""
        return frontier.value

    def bound(self, frontier: Frontier, ahead: Ahead) -> Longs:
        """Return the values with every gap cut most evenly."""
        value = frontier.value
        for begin, end in ahead.gaps:
            row = frontier.cuts[begin] - self.lowest[begin]
            column = frontier.cuts[end] - self.lowest[end]
            value = np.minimum(value + self.tables[begin, end][row, column], UNLIMITED)
        return value

    def guess(self, frontier: Frontier, ahead: Ahead) -> Floats:
        """Return how even the stages can be made."""
        return _guess_squares(self.ticks, frontier, ahead)


def _count_left(total: Longs, frontier: Frontier, ahead: Ahead) -> Longs:
    """Return the sum over the pieces in all gaps, from cumulative sums."""
    parts = (total[frontier.cuts[end]] - total[frontier.cuts[begin]] for begin, end in ahead.gaps)
    return sum(parts, np.zeros(len(frontier), dtype=np.int64))


def _guess_squares(ticks: Longs, frontier: Frontier, ahead: Ahead) -> Floats:
    """Return the sum of the squares of all stages, if the gaps could be cut at any place."""
    guess = frontier.spread
    for begin, end in ahead.gaps:
        left = ticks[frontier.cuts[end]] - ticks[frontier.cuts[begin]]
        guess = guess + np.square(left, dtype=np.float64) / (end - begin)
    return guess


def _put_before(table: Longs, chain: Chain, ranges: CutRanges, stage: int) -> Longs:
    """Return the table of a gap that begins one stage earlier."""
    begin = np.arange(ranges.lowest[stage], ranges.highest[stage] + 1)[:, None]
    end = np.arange(ranges.lowest[stage + 1], ranges.highest[stage + 1] + 1)[None, :]
    squares = (chain.ticks[end] - chain.ticks[begin]) ** 2
    squares[(end <= begin) | (end > ranges.last[stage, begin])] = UNLIMITED
    rows = max(1, _MOST_CELLS // table.size)
    parts = [
        (squares[row : row + rows, :, None] + table[None]).min(axis=1)
        for row in range(0, len(squares), rows)
    ]
    joined: Longs = np.minimum(np.concatenate(parts), UNLIMITED)
    return joined
