"""Plans that are looked at again once their steps have been recorded."""

from dataclasses import replace

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.memory.fitting import recompute_stages
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.revision import revise, update
from penstock.planner.search.choices import Choices
from penstock.sim.engine import simulate

GUESS = Costs(activation_bytes=1.0, weight_stash_bytes=0.5, transfer=0.125)
# Messages take eight times as long as was thought, the first stage half as long again.
SECONDS = [1.5, 1, 1, 0.5]
TRUTH = replace(
    GUESS, forward=SECONDS, backward_input=SECONDS, backward_weight=SECONDS, transfer=1.0
)


def make_plan(family: str = "1F1B", memory: float = 8.0) -> Plan:
    problem = SchedulingProblem.of(GUESS, Placement.loop(4), 8, memory)
    schedule = build(family, ranks=4, microbatches=8)
    return Plan(problem, schedule, lower_bound(problem), Choices(sizes=(1, 1, 1, 1)))


@pytest.mark.parametrize("family", ["1F1B", "ZB-H1", "ZB-H2"])
def test_costs_are_as_recorded_and_bytes_as_known(family: str) -> None:
    plan = make_plan(family)
    costs = update(plan, simulate(lower(plan.schedule), TRUTH))
    assert costs.forward == pytest.approx(SECONDS)
    assert costs.backward_input == pytest.approx(SECONDS)
    assert costs.backward_weight == pytest.approx(SECONDS)
    assert costs.full_backward == pytest.approx((3, 2, 2, 1))
    assert (costs.activation_bytes, costs.weight_stash_bytes) == ((1.0,) * 4, (0.5,) * 4)


def test_a_better_order_at_the_recorded_costs_is_offered() -> None:
    plan = make_plan()
    found = revise(plan, simulate(lower(plan.schedule), TRUTH), seconds=1)
    assert found.old.schedule == plan.schedule
    assert found.old.seconds == pytest.approx(simulate(plan.schedule, TRUTH).end_time)
    assert found.gain > found.least_gain
    assert found.is_offered
    assert found.best is found.new
    assert found.new.choices == plan.choices
    assert found.new.timeline.peak_bytes <= 8
    assert str(found).startswith("at the recorded costs the old order takes ")
    assert str(found).endswith(" less: run the new plan")


def test_a_plan_that_cannot_be_beaten_by_much_is_kept() -> None:
    plan = make_plan()
    recorded = simulate(lower(plan.schedule), TRUTH)
    found = revise(plan, recorded, seconds=0.2, least_gain=1.0)
    assert not found.is_offered
    assert found.best is found.old
    assert str(found).endswith(" less: keep the old one")


def test_a_new_plan_is_never_worse() -> None:
    plan = make_plan("ZB-H2")
    for truth in (GUESS, TRUTH):
        found = revise(plan, simulate(lower(plan.schedule), truth), seconds=0.2)
        assert found.gain >= -1e-9


@pytest.mark.slow
def test_a_plan_that_recomputes_is_revised_with_what_memory_actions_may_save() -> None:
    # The bound was that of orders without such actions, which are slower, and so was the new plan.
    costs = replace(GUESS, message_bytes=0.0625, host_link=8.0)
    problem = SchedulingProblem.of(costs, Placement.loop(2), 17, 1.7)
    schedule = recompute_stages(problem, simulate(build("1F1B", ranks=2, microbatches=17), costs))
    assert schedule is not None
    plan = Plan(problem, schedule, lower_bound(problem.without_limit))
    found = revise(plan, simulate(lower(schedule), replace(costs, transfer=0.25)), seconds=0)
    assert found.old.lower_bound <= found.new.seconds <= found.old.seconds
    assert found.new.seconds < lower_bound(found.new.problem)
    assert found.new.keeps_limit


def test_a_step_of_another_order_is_refused() -> None:
    other = simulate(lower(build("GPipe", ranks=4, microbatches=8)), TRUTH)
    with pytest.raises(ScheduleError, match="compare a plan with a step that ran in its order"):
        revise(make_plan(), other)
