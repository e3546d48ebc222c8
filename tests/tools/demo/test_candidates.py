"""Candidates: cuts, predictions and plans from the costs of pieces."""

import pytest

pytest.importorskip("torch")

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.tools.demo.candidates import (
    best_family,
    family_candidate,
    join_costs,
    plan_candidate,
    plan_candidates,
)
from penstock.tools.demo.task import Task

# An embedding, six layers and a head that takes as long as two.
WORK = (0.2, 1, 1, 1, 1, 1, 1, 2)
COSTS = Costs(
    forward=WORK,
    backward_input=WORK,
    backward_weight=WORK,
    full_backward=[1.9 * work for work in WORK],
    transfer=((0.0, 0.1), (0.1, 0.0)),
    activation_bytes=[10 * work for work in WORK],
    parameter_bytes=(9, 1, 1, 1, 1, 1, 1, 4),
    message_bytes=(0, 2, 2, 2, 2, 2, 2, 2),
    workspace_bytes=(1, 2, 2, 2, 2, 2, 2, 5),
)
TASK = Task(ranks=2, steps=1)


def test_costs_of_joined_pieces_add_up_except_messages_and_workspace() -> None:
    joined = join_costs(COSTS, (5, 3))
    assert joined.forward == pytest.approx((4.2, 4.0))
    assert joined.full_backward == pytest.approx((1.9 * 4.2, 1.9 * 4.0))
    assert joined.parameter_bytes == (13, 6)
    assert joined.message_bytes == (0, 2)
    assert joined.workspace_bytes == (2, 5)
    assert joined.transfer == COSTS.transfer


@pytest.mark.parametrize(
    ("family", "sizes"), [("1F1B", (5, 3)), ("ZBV", (3, 2, 2, 1)), ("DualPipe", (5, 3))]
)
def test_family_gets_the_cut_with_the_fastest_slowest_stage(
    family: str, sizes: tuple[int, ...]
) -> None:
    candidate = family_candidate(family, TASK, COSTS)
    assert (candidate.name, candidate.sizes) == (family, sizes)
    assert candidate.predicted.schedule == candidate.schedule
    assert len(candidate.sizes) == candidate.schedule.dataflow.num_parts


def test_plans_keep_the_limit_and_the_fastest_comes_first() -> None:
    rival = family_candidate("1F1B", TASK, COSTS)
    limit = rival.predicted.peak_bytes
    found = plan_candidates(TASK, COSTS, memory=limit, seconds=0.5)
    spans = [one.plan.timeline.end_time for one in found]
    assert spans == sorted(spans)
    assert spans[0] <= rival.predicted.end_time
    assert all(one.plan.keeps_limit for one in found)
    assert {one.plan.problem.placement for one in found} == {
        Placement.loop(2),
        Placement.loop(2, 2),
        Placement.v(2),
    }
    candidate = found[0].candidate
    assert (candidate.schedule, candidate.sizes) == (found[0].plan.schedule, found[0].sizes)


def test_placements_with_more_stages_than_pieces_are_left_out() -> None:
    transfer = [[0.0] * 5] * 5
    costs = Costs.from_mapping(COSTS.to_mapping() | {"transfer": transfer})
    (found,) = plan_candidates(Task(ranks=5, steps=1), costs, memory=1e9, seconds=0.1)
    assert found.plan.problem.placement == Placement.loop(5)


def test_plan_without_a_limit_is_not_slower() -> None:
    limit = family_candidate("1F1B", TASK, COSTS).predicted.peak_bytes
    placement = Placement.loop(2)
    limited = plan_candidate(TASK, COSTS, placement, memory=limit, seconds=1)
    free = plan_candidate(TASK, COSTS, placement, memory=None, seconds=1)
    assert free.plan.timeline.end_time <= limited.plan.timeline.end_time
    assert free.plan.lower_bound <= limited.plan.lower_bound


def test_the_best_family_keeps_the_limit() -> None:
    task = Task(ranks=2, steps=1)
    costs = Costs(
        forward=[1.0] * 8,
        backward_input=[1.0] * 8,
        backward_weight=[1.0] * 8,
        activation_bytes=[1.0] * 8,
    )
    free = best_family(task, costs, memory=1e9)
    assert free is not None
    tight = best_family(task, costs, memory=8.0)
    assert tight is not None
    assert tight.predicted.peak_bytes <= 8.0
    assert free.predicted.end_time <= tight.predicted.end_time
    assert best_family(task, costs, memory=1.0) is None
