"""Time against memory."""

import pytest

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.planner.curve_planning import memory_curve

UNEVEN = Costs(
    forward=[1, 1, 1.6, 1], activation_bytes=[2, 1, 1, 1], weight_stash_bytes=0.5, transfer=0.1
)


@pytest.mark.parametrize("costs", [Costs(activation_bytes=1), UNEVEN])
def test_more_memory_is_never_slower_and_the_bound_is_below(costs: Costs) -> None:
    found = memory_curve(costs, ranks=4, microbatches=6, points=4, seconds=0.2)
    assert len(found.points) == 4
    for tight, loose in zip(found.points, found.points[1:], strict=False):
        assert tight.memory < loose.memory
        assert loose.seconds <= tight.seconds
        assert loose.lower_bound <= tight.lower_bound
    for point in found.points:
        assert point.lower_bound <= point.seconds * (1 + 1e-12)
        assert point.plan.timeline.peak_bytes <= point.memory * (1 + 1e-9)
        assert set(point.plan.problem.memory) == {point.memory}


def test_a_plan_for_a_tighter_limit_is_used_again_if_none_is_faster() -> None:
    found = memory_curve(
        Costs(activation_bytes=1), ranks=2, microbatches=4, limits=[9, 2, 8], seconds=0.2
    )
    assert [point.memory for point in found.points] == [2, 8, 9]
    assert found.points[2].plan.schedule == found.points[1].plan.schedule


def test_costs_without_bytes_have_no_curve() -> None:
    with pytest.raises(ArgumentError, match="the costs must have bytes"):
        memory_curve(Costs(), ranks=2, microbatches=4, seconds=0.1)
    with pytest.raises(ArgumentError, match="points must be at least 1"):
        memory_curve(UNEVEN, ranks=4, microbatches=4, points=0)
    with pytest.raises(ArgumentError, match="limits must not be empty"):
        memory_curve(UNEVEN, ranks=4, microbatches=4, limits=[])
