"""The way of a value to all stages that need it."""

from itertools import pairwise

import pytest

from penstock.ir.placement import Placement
from penstock.ir.relays import relay_sources


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # A rank for each stage: from stage to stage.
        (range(8), {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}),
        (Placement.loop(4, 2).rank_of_stage, {1: 0, 2: 1, 3: 2, 4: 0, 5: 1, 6: 2, 7: 3}),
        (Placement.v(4, 2).rank_of_stage, {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 1, 7: 0}),
        # One rank for all: nothing is sent, and each stage takes it from the one before.
        ([0] * 8, {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6}),
    ],
)
def test_a_stage_takes_a_value_from_its_own_rank_or_else_from_the_stage_before(
    ranks: list[int], expected: dict[int, int]
) -> None:
    assert relay_sources(0, range(1, 8), ranks) == expected


def test_a_value_reaches_a_rank_that_has_not_got_it_from_the_last_stage_that_has() -> None:
    ranks = Placement.loop(4, 2).rank_of_stage
    assert relay_sources(1, [3, 4, 5, 7], ranks) == {3: 1, 4: 3, 5: 1, 7: 3}


@pytest.mark.parametrize("placement", [Placement.loop(4, 2), Placement.v(4, 2)])
@pytest.mark.parametrize("origin", range(7))
def test_every_other_rank_gets_a_value_once(placement: Placement, origin: int) -> None:
    ranks = placement.rank_of_stage
    sources = relay_sources(origin, range(origin + 1, 8), ranks)
    arrivals = [ranks[stage] for stage, source in sources.items() if ranks[stage] != ranks[source]]
    assert sorted(arrivals) == sorted(set(ranks[origin + 1 :]) - {ranks[origin]})


def test_nothing_goes_back() -> None:
    assert relay_sources(4, [1, 6], range(8)) == {6: 4}
    assert all(a < b for a, b in pairwise([2, *relay_sources(2, [7, 3, 5], range(8))]))
