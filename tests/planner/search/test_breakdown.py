"""The parts of a step add up to its seconds, and explain why one plan is slower."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.breakdown import Breakdown, break_down, why_slower
from penstock.planner.search.choices import Choices
from penstock.sim.period import BOUNDARIES, DEFAULT_BOUNDARY, Boundary
from tests.strategies import costs, schedules


def make_plan(
    schedule: Schedule,
    costs: Costs,
    choices: Choices | None = None,
    boundary: Boundary = DEFAULT_BOUNDARY,
) -> Plan:
    problem = SchedulingProblem.of(
        costs, schedule.placement, schedule.microbatches, boundary=boundary
    )
    return Plan(problem, schedule, 1.0, choices)


@given(st.data())
def test_causes_add_up_to_the_step(data: st.DataObject) -> None:
    schedule = data.draw(schedules(max_ranks=4, max_microbatches=6))
    priced = data.draw(costs(schedule))
    choices = Choices(sizes=(1,) * schedule.num_stages, checkpointed=(0,))
    plan = make_plan(schedule, priced, choices, data.draw(st.sampled_from(BOUNDARIES)))
    assert break_down(plan).seconds == pytest.approx(plan.seconds)


def test_waiting_for_the_last_rank_is_part_of_the_bubble() -> None:
    schedule = build("ZB-H2", ranks=4, microbatches=8)
    waiting = make_plan(schedule, Costs(), Choices((1,) * 4))
    free = make_plan(schedule, Costs(), Choices((1,) * 4), "nothing")
    assert (waiting.seconds, free.seconds) == (27, 24)
    assert (break_down(waiting).bubble, break_down(free).bubble) == (3, 0)


def test_every_cause_is_found() -> None:
    schedule = build("1F1B", ranks=2, microbatches=2)
    uneven = Costs(forward=[1, 2], backward_input=[2, 2], backward_weight=[1, 1], transfer=0.5)
    found = break_down(make_plan(schedule, uneven, Choices((1, 1), checkpointed=(0,))))
    # Rank 0 computes for 8, one second twice over, and rank 1 for 10.
    assert found == Breakdown(work=8, recompute=1, imbalance=1, transfer=1, bubble=4)


def test_causes_that_matter_are_listed_largest_first() -> None:
    best = Breakdown(work=90, recompute=0, imbalance=0, transfer=2, bubble=8)
    other = replace(best, recompute=0.3, bubble=11, transfer=1, imbalance=3.5)
    assert why_slower(other, best) == "slower by 5.8 %: imbalance +3.5 %, bubble +3.0 %"
    assert why_slower(best, best) == "as fast"
