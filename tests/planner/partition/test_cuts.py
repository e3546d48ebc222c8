"""The search alone; it starts with too few states, and must widen."""

from random import Random

import numpy as np
import pytest

from penstock.ir.placement import Placement
from penstock.planner.partition.chain import (
    UNLIMITED,
    Chain,
    Limits,
    add_up,
    count_ticks,
    find_cut_ranges,
)
from penstock.planner.partition.cuts import BestCuts, NoCuts, find_cuts
from penstock.planner.partition.goals import Evenness, Goal, SlowestRank
from penstock.planner.partition.steps import sequence_cuts

PLACEMENTS = [Placement.loop(4), Placement.v(4), Placement.loop(3, 2), Placement.loop(3, 3)]


def random_chain(placement: Placement, num_pieces: int, seed: int) -> Chain:
    random = Random(seed)
    ticks = count_ticks([random.randint(1, 20) for _ in range(num_pieces)])
    nothing = np.zeros((placement.num_stages, num_pieces + 1), dtype=np.int64)
    return Chain(placement, add_up(ticks), nothing)


def search(
    chain: Chain, goal_name: str, *, width: int = 1, effort: int = UNLIMITED
) -> BestCuts | NoCuts:
    ranks = chain.placement.num_ranks
    limits = Limits(UNLIMITED, UNLIMITED, (UNLIMITED,) * ranks)
    ranges, sequence = find_cut_ranges(chain, limits), sequence_cuts(chain.placement, [0] * ranks)
    assert ranges is not None
    goals: dict[str, Goal] = {
        "evenness": Evenness.of(chain, ranges, sequence),
        "slowest rank": SlowestRank(chain.ticks, ranges.least_ticks, floor=0),
    }
    return find_cuts(chain, limits, ranges, sequence, goals[goal_name], width=width, effort=effort)


@pytest.mark.parametrize("goal", ["evenness", "slowest rank"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_a_narrow_start_finds_what_a_wide_one_finds(placement: Placement, goal: str) -> None:
    for seed in range(5):
        chain = random_chain(placement, 13, seed)
        narrow, wide = search(chain, goal, width=1), search(chain, goal, width=100_000)
        assert isinstance(narrow, BestCuts)
        assert isinstance(wide, BestCuts)
        assert (narrow.value, narrow.is_proven, wide.is_proven) == (wide.value, True, True)


def test_a_search_without_effort_proves_nothing() -> None:
    chain = random_chain(Placement.loop(3), 9, seed=0)
    assert search(chain, "evenness", effort=0) == NoCuts(is_proven=False)


def test_whole_numbers_stay_exact_as_ticks() -> None:
    ticks = count_ticks([1, 3, 1000])
    assert (ticks * 1000 == ticks[2] * np.array([1, 3, 1000])).all()
