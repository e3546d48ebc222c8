"""The chain of pieces as whole numbers, and the places where each cut may lie.

pieces    0   1   2   3   4   5   6   7         cuts = (0, 2, 5, 8): stage 0 holds the
        |       |           |           |       pieces 0-1, stage 1 holds 2-4, stage 2 holds 5-7
cut     0       1           2           3

Whole numbers make equal pieces equal to the last bit, so that ties are ties everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.placement import Placement

__all__ = [
    "UNLIMITED",
    "Chain",
    "CutRanges",
    "Limits",
    "Longs",
    "add_up",
    "count_ticks",
    "find_cut_ranges",
]

Longs = NDArray[np.int64]

# The whole chain takes at most this many ticks, so that sums of squares stay below UNLIMITED.
_MOST_TICKS_AS_POWER = 30
UNLIMITED = 1 << 61


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Ticks of the first pieces, and the bytes that they take in every stage."""

    placement: Placement
    ticks: Longs
    bytes: Longs

    @property
    def num_pieces(self) -> int:
        """The number of pieces."""
        return len(self.ticks) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The most ticks of a stage and of a rank, and the most bytes of each rank."""

    stage_ticks: int
    rank_ticks: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CutRanges:
    """How far a stage may reach, between which pieces each cut lies, what a stage takes at least.

    A stage that begins before piece i ends by `last[stage, i]`; one that ends before piece j
    begins at `first[stage, j]` or later. Cut c lies from `lowest[c]` to `highest[c]`.
    """

    last: Longs
    first: Longs
    lowest: Longs
    highest: Longs
    least_ticks: Longs
    least_bytes: Longs


def add_up(amounts: Longs) -> Longs:
    """Return the cumulative sums of every row, from 0 on."""
    sums = np.zeros((*amounts.shape[:-1], amounts.shape[-1] + 1), dtype=np.int64)
    np.cumsum(amounts, axis=-1, out=sums[..., 1:])
    return sums


def count_ticks(seconds: Sequence[float]) -> Longs:
    """Return seconds as whole ticks, of which the whole chain has a billion at most.

    The tick is a power of two, so that whole numbers stay exact.
    """
    exponent = int(np.frexp(sum(seconds))[1])
    scaled = np.ldexp(np.asarray(seconds, dtype=np.float64), _MOST_TICKS_AS_POWER - exponent)
    return np.rint(scaled).astype(np.int64)


def find_cut_ranges(chain: Chain, limits: Limits) -> CutRanges | None:
    """Return the ranges that limits leave to each cut, or None if a cut has no place.

    What the other stages of a rank take at least is taken off its limits, until that changes
    nothing any more.
    """
    least_ticks = least_bytes = np.zeros(chain.placement.num_stages, dtype=np.int64)
    while True:
        last, first = _reaches(chain, limits, least_ticks, least_bytes)
        lowest, highest = _cut_bounds(last, first)
        if (lowest > highest).any():
            return None
        more_ticks, more_bytes = _least(chain, lowest, highest)
        if (more_ticks == least_ticks).all() and (more_bytes == least_bytes).all():
            return CutRanges(last, first, lowest, highest, least_ticks, least_bytes)
        least_ticks, least_bytes = more_ticks, more_bytes


def _reaches(
    chain: Chain, limits: Limits, least_ticks: Longs, least_bytes: Longs
) -> tuple[Longs, Longs]:
    last, first = np.empty_like(chain.bytes), np.empty_like(chain.bytes)
    for stage, rank in enumerate(chain.placement.rank_of_stage):
        others = [other for other in chain.placement.stages(rank) if other != stage]
        ticks = min(limits.stage_ticks, limits.rank_ticks - int(least_ticks[others].sum()))
        free = limits.rank_bytes[rank] - int(least_bytes[others].sum())
        by_ticks, by_bytes = _reach(chain.ticks, ticks), _reach(chain.bytes[stage], free)
        last[stage] = np.minimum(by_ticks[0], by_bytes[0])
        first[stage] = np.maximum(by_ticks[1], by_bytes[1])
    return last, first


def _reach(total: Longs, most: int) -> tuple[Longs, Longs]:
    """Return, for every place, the farthest place after and before it within `most`."""
    after = np.searchsorted(total, total + most, side="right") - 1
    before = np.searchsorted(total, total - most, side="left")
    # Less than nothing fits nowhere: the ends of the chain then say so.
    return np.maximum(after, 0), np.minimum(before, len(total) - 1)


def _cut_bounds(last: Longs, first: Longs) -> tuple[Longs, Longs]:
    stages, pieces = len(last), last.shape[1] - 1
    lowest = np.arange(stages + 1)
    highest = pieces - lowest[::-1]
    highest[0], lowest[-1] = 0, pieces
    for stage in range(stages):
        highest[stage + 1] = min(highest[stage + 1], last[stage, highest[stage]])
    for stage in reversed(range(stages)):
        lowest[stage] = max(lowest[stage], first[stage, lowest[stage + 1]])
        highest[stage] = min(highest[stage], highest[stage + 1] - 1)
    for stage in range(stages):
        lowest[stage + 1] = max(lowest[stage + 1], lowest[stage] + 1)
    return lowest, highest


def _least(chain: Chain, lowest: Longs, highest: Longs) -> tuple[Longs, Longs]:
    """Return, for every stage, the least ticks and bytes with its cuts between these."""
    least = np.empty((2, len(lowest) - 1), dtype=np.int64)
    for stage in range(len(lowest) - 1):
        begin = np.arange(lowest[stage], highest[stage] + 1)
        end = np.maximum(begin + 1, lowest[stage + 1])
        least[0, stage] = (chain.ticks[end] - chain.ticks[begin]).min()
        least[1, stage] = (chain.bytes[stage, end] - chain.bytes[stage, begin]).min()
    return least[0], least[1]
