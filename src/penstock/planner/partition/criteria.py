"""Which cuts are best: slowest stage first, then slowest rank, then evenness."""

from dataclasses import replace

import numpy as np

from penstock.planner.partition.chain import (
    UNLIMITED,
    Chain,
    CutRanges,
    Limits,
    Longs,
    find_cut_ranges,
)
from penstock.planner.partition.cuts import BestCuts, NoCuts, find_cuts
from penstock.planner.partition.fit import find_any_fit, find_fit, guess_fit, sum_ranks
from penstock.planner.partition.goals import Evenness, Goal, SlowestRank
from penstock.planner.partition.steps import CutSequence, sequence_cuts

__all__ = ["best_cuts"]

# The number of states examined for a faster slowest rank and for more even stages, and how often a
# proof may turn up a faster stage instead. These are counts, not times, so that every machine
# gives the same answer.
_EFFORT = 1 << 22
_MOST_PROOFS = 3


def best_cuts(chain: Chain, caps: tuple[int, ...]) -> BestCuts | NoCuts:
    """Return the best cuts under caps of bytes; the value is the ticks of the slowest stage."""
    fastest = _least_slowest_stage(chain, caps)
    if isinstance(fastest, NoCuts):
        return fastest
    ranks = _least_slowest_rank(chain, Limits(fastest.value, UNLIMITED, caps), fastest.cuts)
    even = _most_even(chain, Limits(fastest.value, ranks.value, caps), ranks.cuts)
    is_proven = fastest.is_proven and ranks.is_proven and even.is_proven
    return BestCuts(even.cuts, fastest.value, is_proven)


def _least_slowest_stage(chain: Chain, caps: tuple[int, ...]) -> BestCuts | NoCuts:
    """Return cuts whose slowest stage is as fast as the bytes allow."""
    least = _least_stage_ticks(chain)
    if set(caps) == {UNLIMITED}:
        # Each stage takes as much as it can: the latest places of the cuts make an answer.
        ranges = _ranges(chain, Limits(least, UNLIMITED, caps))
        return BestCuts(tuple(ranges.highest.tolist()), least, is_proven=True)
    best = find_any_fit(chain, caps)
    if isinstance(best, NoCuts):
        return best
    lengths = np.unique(chain.ticks[None, :] - chain.ticks[:, None])
    best = _guess_fastest(chain, caps, best, lengths[lengths >= least])
    return _prove_fastest(chain, caps, best, lengths[lengths >= least])


def _guess_fastest(
    chain: Chain, caps: tuple[int, ...], best: BestCuts, candidates: Longs
) -> BestCuts:
    """Halve the candidates for the slowest stage; what is not found soon counts as missing."""
    candidates = candidates[candidates < best.value]
    while len(candidates):
        middle = len(candidates) // 2
        found = guess_fit(chain, caps, stage_ticks=int(candidates[middle]))
        if isinstance(found, NoCuts):
            candidates = candidates[middle + 1 :]
        else:
            best, candidates = found, candidates[candidates < found.value]
    return best


def _prove_fastest(
    chain: Chain, caps: tuple[int, ...], best: BestCuts, candidates: Longs
) -> BestCuts:
    """Show that the next faster candidate does not fit, and with it none that is faster still."""
    for _ in range(_MOST_PROOFS):
        candidates = candidates[candidates < best.value]
        if not len(candidates):
            return replace(best, is_proven=True)
        found = find_fit(chain, caps, stage_ticks=int(candidates[-1]))
        if isinstance(found, NoCuts):
            return replace(best, is_proven=found.is_proven)
        best = _guess_fastest(chain, caps, found, candidates)
    return best


def _least_stage_ticks(chain: Chain) -> int:
    """Return the ticks of the slowest stage, when it is fastest and bytes do not count."""
    ticks, num_places = chain.ticks, chain.num_pieces + 1
    begin, end = np.arange(num_places)[:, None], np.arange(num_places)[None, :]
    # Row i, column j: a stage from piece i up to piece j.
    stage = np.where(begin < end, ticks[end] - ticks[begin], UNLIMITED)
    slowest = stage[:, -1]
    for _ in range(chain.placement.num_stages - 1):
        slowest = np.maximum(stage, slowest[None, :]).min(axis=1)
    return int(slowest[0])


def _least_slowest_rank(chain: Chain, limits: Limits, cuts: tuple[int, ...]) -> BestCuts:
    ranges = _ranges(chain, limits)
    least = sum_ranks(chain.placement, ranges.least_ticks)
    at_hand = BestCuts(cuts, max(sum_ranks(chain.placement, _stage_ticks(chain, cuts))))
    goal = SlowestRank(chain.ticks, ranges.least_ticks, max(*least, _rank_floor(chain)))
    return _improve(chain, limits, sequence_cuts(chain.placement, least), goal, at_hand)


def _rank_floor(chain: Chain) -> int:
    """Return ticks that some rank surely takes: that with the largest piece or most pieces."""
    placement, pieces = chain.placement, np.sort(np.diff(chain.ticks))
    fewest_stages = min(len(placement.stages(rank)) for rank in range(placement.num_ranks))
    most_pieces = -(-len(pieces) // placement.num_ranks)
    return int(max(pieces[-1] + pieces[: fewest_stages - 1].sum(), pieces[:most_pieces].sum()))


def _most_even(chain: Chain, limits: Limits, cuts: tuple[int, ...]) -> BestCuts:
    ranges = _ranges(chain, limits)
    sequence = sequence_cuts(chain.placement, sum_ranks(chain.placement, ranges.least_ticks))
    at_hand = BestCuts(cuts, int(np.square(_stage_ticks(chain, cuts)).sum()))
    return _improve(chain, limits, sequence, Evenness.of(chain, ranges, sequence), at_hand)


def _improve(
    chain: Chain, limits: Limits, sequence: CutSequence, goal: Goal, at_hand: BestCuts
) -> BestCuts:
    """Return the best answer within the limits, or the one at hand."""
    ranges = _ranges(chain, limits)
    found = find_cuts(chain, limits, ranges, sequence, goal, at_hand=at_hand, effort=_EFFORT)
    return at_hand if isinstance(found, NoCuts) else found


def _ranges(chain: Chain, limits: Limits) -> CutRanges:
    ranges = find_cut_ranges(chain, limits)
    assert ranges is not None, "these limits are known to have an answer"
    return ranges


def _stage_ticks(chain: Chain, cuts: tuple[int, ...]) -> Longs:
    return np.diff(chain.ticks[list(cuts)])
