"""Cuts that keep every rank within its bytes, and how many more bytes it would take."""

from dataclasses import replace

import numpy as np

from penstock.ir.placement import Placement
from penstock.planner.partition.chain import (
    UNLIMITED,
    Chain,
    CutRanges,
    Limits,
    Longs,
    find_cut_ranges,
)
from penstock.planner.partition.cuts import BestCuts, NoCuts, find_cuts
from penstock.planner.partition.goals import Excess
from penstock.planner.partition.steps import CutSequence, sequence_cuts

__all__ = ["bytes_per_rank", "closest_cuts", "find_any_fit", "find_fit", "guess_fit", "sum_ranks"]

# The number of states examined: for a guess, for a proof that nothing fits, and for one that
# nothing comes closer. These are counts, not times, so that every machine answers alike.
_EFFORT_OF_GUESS = 1 << 19
_EFFORT_OF_FIT = 1 << 23
_EFFORT_OF_CLOSEST = 1 << 22
# Guesses are close enough when the next would differ by one part in this many.
_NEAR_ENOUGH = 1000


def find_fit(
    chain: Chain, caps: tuple[int, ...], *, stage_ticks: int = UNLIMITED
) -> BestCuts | NoCuts:
    """Return any cuts with no slower stage that keep every rank within its bytes.

    The value of an answer is the ticks of its slowest stage.
    """
    return _fit(chain, caps, stage_ticks, _EFFORT_OF_FIT)


def find_any_fit(chain: Chain, caps: tuple[int, ...]) -> BestCuts | NoCuts:
    """Return cuts for stages of any length, with a last attempt from larger caps down."""
    found = find_fit(chain, caps)
    if isinstance(found, BestCuts) or found.is_proven:
        return found
    closest = closest_cuts(chain, caps)
    return found if closest.value > 0 else _as_fit(chain, closest.cuts)


def guess_fit(
    chain: Chain, caps: tuple[int, ...], *, stage_ticks: int = UNLIMITED
) -> BestCuts | NoCuts:
    """Return the same as `find_fit`, but give up soon."""
    return _fit(chain, caps, stage_ticks, _EFFORT_OF_GUESS)


def closest_cuts(chain: Chain, caps: tuple[int, ...]) -> BestCuts:
    """Return the cuts whose worst rank exceeds its cap by least; the value is that excess."""
    closest = _guess_closest(chain, caps)
    limits = Limits(UNLIMITED, UNLIMITED, _raise(caps, closest.value - 1))
    ranges = find_cut_ranges(chain, limits)
    if ranges is None:
        return replace(closest, is_proven=True)
    sequence = _sequence_by_bytes(chain, caps, ranges)
    goal = Excess.of(chain, caps, ranges, sequence, floor=1)
    found = find_cuts(
        chain, limits, ranges, sequence, goal, at_hand=closest, effort=_EFFORT_OF_CLOSEST
    )
    return closest if isinstance(found, NoCuts) else found


def bytes_per_rank(chain: Chain, cuts: tuple[int, ...]) -> list[int]:
    """Return what each rank takes with these cuts."""
    places, stages = np.array(cuts), np.arange(len(cuts) - 1)
    taken = chain.bytes[stages, places[1:]] - chain.bytes[stages, places[:-1]]
    return sum_ranks(chain.placement, taken)


def sum_ranks(placement: Placement, per_stage: Longs) -> list[int]:
    """Return, for every rank, the sum over its stages."""
    ranks = range(placement.num_ranks)
    return [int(per_stage[list(placement.stages(rank))].sum()) for rank in ranks]


def _fit(chain: Chain, caps: tuple[int, ...], stage_ticks: int, effort: int) -> BestCuts | NoCuts:
    limits = Limits(stage_ticks, UNLIMITED, caps)
    ranges = find_cut_ranges(chain, limits)
    if ranges is None:
        return NoCuts(is_proven=True)
    sequence = _sequence_by_bytes(chain, caps, ranges)
    goal = Excess.of(chain, caps, ranges, sequence, floor=0)
    found = find_cuts(chain, limits, ranges, sequence, goal, effort=effort)
    return found if isinstance(found, NoCuts) else _as_fit(chain, found.cuts)


def _as_fit(chain: Chain, cuts: tuple[int, ...]) -> BestCuts:
    return BestCuts(cuts, int(np.diff(chain.ticks[list(cuts)]).max()))


def _guess_closest(chain: Chain, caps: tuple[int, ...]) -> BestCuts:
    """Halve what all caps are raised by, as long as cuts are soon found that fit."""
    ranges = find_cut_ranges(chain, Limits(UNLIMITED, UNLIMITED, (UNLIMITED,) * len(caps)))
    assert ranges is not None, "without limits every cut has a place"
    closest = _measure(chain, caps, tuple(ranges.lowest.tolist()))
    low = 0
    while closest.value - low > max(1, closest.value // _NEAR_ENOUGH):
        guess = (low + closest.value) // 2
        found = guess_fit(chain, _raise(caps, guess))
        if isinstance(found, NoCuts):
            low = guess
        else:
            closest = _measure(chain, caps, found.cuts)
    return closest


def _measure(chain: Chain, caps: tuple[int, ...], cuts: tuple[int, ...]) -> BestCuts:
    taken = bytes_per_rank(chain, cuts)
    return BestCuts(cuts, max(t - cap for t, cap in zip(taken, caps, strict=True)))


def _raise(caps: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(cap + by for cap in caps)


def _sequence_by_bytes(chain: Chain, caps: tuple[int, ...], ranges: CutRanges) -> CutSequence:
    """Return the sequence that begins where the bytes are tighter."""
    least = sum_ranks(chain.placement, ranges.least_bytes)
    return sequence_cuts(chain.placement, [t - cap for t, cap in zip(least, caps, strict=True)])
