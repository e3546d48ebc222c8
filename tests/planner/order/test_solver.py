"""Solved schedules may run, keep every limit, and are as fast as any that is known."""

from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.errors import MemoryLimitError
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import Effort
from penstock.planner.exact.prove import prove
from penstock.planner.order.best_so_far import BestSoFar
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.search import search_orders
from penstock.planner.order.solver import Progress, solve
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary
from tests.planner.problems import draw_problem

PLACEMENTS = (
    Placement.loop(1),
    Placement.loop(4),
    Placement.loop(3, 2),
    Placement.v(4),
    Placement((0, 1, 1, 2, 0)),
)


def best_family(problem: SchedulingProblem) -> float:
    """Return the step of the fastest family that keeps the limit, infinite if none does."""
    timelines = [simulate(schedule, problem.costs) for schedule in fixed_schedules(problem)]
    limit = np.array(problem.memory)
    fitting = [t for t in timelines if (np.array(t.rank_peak_bytes) <= limit).all()]
    return min((t.period(problem.boundary) for t in fitting), default=inf)


def verify(plan: Plan) -> None:
    """Require a complete schedule within the limit, between the bound and the families."""
    check(plan.schedule)
    assert plan.keeps_limit
    assert plan.schedule.placement == plan.problem.placement
    assert plan.schedule.microbatches == plan.problem.microbatches
    assert plan.gap >= 0
    assert plan.seconds <= best_family(plan.problem)


@pytest.mark.parametrize("capacity", [None, 1.0, 1.75, 4.0])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_solved_schedules_keep_what_they_promise(
    placement: Placement, capacity: float | None
) -> None:
    for seed, full_backward in ((1, False), (2, True)):
        problem = draw_problem(
            Random(seed), placement, 9, capacity=capacity, full_backward=full_backward
        )
        verify(solve(problem, seconds=0.2))


@pytest.mark.parametrize("boundary", ["everything", "gradients", "nothing", "papers"])
@pytest.mark.parametrize("placement", [Placement.loop(4), Placement.v(3)], ids=str)
def test_solver_makes_the_seconds_of_the_boundary_few(
    placement: Placement, boundary: Boundary
) -> None:
    for seed in range(3):
        problem = draw_problem(Random(seed), placement, 6, capacity=2.5, boundary=boundary)
        plan = solve(problem, seconds=0.2)
        verify(plan)
        assert plan.seconds == plan.timeline.period(boundary)


def test_without_any_time_the_plan_is_a_family_or_better() -> None:
    for placement in PLACEMENTS:
        verify(solve(draw_problem(Random(3), placement, 6, capacity=1.5), seconds=0.0))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_costs_and_bytes_may_be_nothing(placement: Placement) -> None:
    nothing = Costs(forward=0, backward_input=0, backward_weight=0)
    no_weights = Costs(backward_weight=0, activation_bytes=1)
    for costs in (nothing, no_weights, Costs(send=0.25)):
        for microbatches in (1, 3):
            verify(solve(SchedulingProblem.of(costs, placement, microbatches, 99), seconds=0.1))


def test_equal_costs_and_room_enough_leave_no_bubble() -> None:
    for placement in (Placement.loop(4), Placement.v(4)):
        problem = SchedulingProblem.of(Costs(), placement, 12, boundary="nothing")
        plan = solve(problem, seconds=2)
        assert plan.step.bubble_rate == 0
        assert plan.gap == pytest.approx(0, abs=1e-9)


def test_small_problems_are_proven() -> None:
    pytest.importorskip("ortools")
    for seed in range(3):
        plan = solve(draw_problem(Random(seed), Placement.loop(3), 4, capacity=1.5), seconds=20)
        verify(plan)
        assert plan.gap <= 1e-6


def test_the_same_problem_gives_the_same_schedule() -> None:
    # The bound is reached before the clock has a say.
    costs = Costs(activation_bytes=1, weight_stash_bytes=1)
    problem = SchedulingProblem.of(costs, Placement.v(8), 24, memory=8)
    one, other = (solve(problem, seconds=30) for _ in range(2))
    assert one.schedule == other.schedule


def test_progress_goes_down_towards_the_bound() -> None:
    problem = draw_problem(Random(7), Placement.loop(4), 12, capacity=2)
    told: list[Progress] = []
    plan = solve(problem, seconds=0.5, progress=told.append)
    steps = [progress.step for progress in told]
    assert steps == sorted(steps, reverse=True)
    assert {progress.lower_bound for progress in told} == {plan.lower_bound}
    assert all(progress.step >= plan.lower_bound for progress in told)


def test_a_limit_that_nothing_keeps_is_an_error() -> None:
    problem = SchedulingProblem(Costs(activation_bytes=1), Placement.loop(2), 4, (0.5, 4.0))
    with pytest.raises(MemoryLimitError, match=r"SchedulingProblem.of, which says what"):
        solve(problem, seconds=0.2)


UNEVEN = {
    "embedding": Costs(forward=(1.2, *[1.0] * 7), backward_weight=0.7, transfer=0.03),
    "head": Costs(
        forward=(*[1.0] * 7, 1.25),
        backward_input=(*[1.0] * 7, 1.25),
        backward_weight=(*[0.7] * 7, 0.875),
        transfer=0.03,
    ),
    "slow rank": Costs(
        forward=(*[1.0] * 4, 1.15, *[1.0] * 3),
        backward_input=(*[1.0] * 4, 1.15, *[1.0] * 3),
        backward_weight=(*[0.7] * 4, 0.8, *[0.7] * 3),
        transfer=0.03,
    ),
    "slow link": Costs(
        backward_weight=0.7,
        transfer=[[0.5 if {a, b} == {3, 4} else 0.03 for a in range(8)] for b in range(8)],
    ),
}


# The step is counted as in papers. Until the last rank ends, the first and the last microbatch
# also travel through all stages, whatever the order: plans meet the bound there, and gain less.
@pytest.mark.slow
@pytest.mark.parametrize("costs", UNEVEN.values(), ids=UNEVEN.keys())
def test_uneven_models_run_a_tenth_faster_than_with_any_family(costs: Costs) -> None:
    sized = replace(costs, activation_bytes=1, weight_stash_bytes=0.5)
    # More than families with one activation per rank need, less than those with two.
    problem = SchedulingProblem.of(sized, Placement.loop(8), 16, memory=13, boundary="papers")
    plan = solve(problem, seconds=5)
    verify(plan)
    assert plan.seconds * 1.1 <= best_family(plan.problem)
    until_all_end = solve(replace(problem, boundary="everything"), seconds=5)
    verify(until_all_end)
    assert until_all_end.gap <= 0.002
    assert until_all_end.seconds <= best_family(until_all_end.problem)


@pytest.mark.slow
def test_the_search_alone_is_close_to_the_best_there_is() -> None:
    pytest.importorskip("ortools")
    pytest.importorskip("numba")
    random = Random(0)
    for seed in range(200):
        ranks, microbatches = random.randint(2, 4), random.randint(3, 8)
        turns = random.choice((1, 1, 2))
        placement = random.choice((Placement.loop, Placement.v))(ranks, turns)
        capacity = random.choice((1.25, 1.5, 2.0, 4.0))
        problem = draw_problem(Random(seed), placement, microbatches, capacity=capacity)
        found = BestSoFar(problem, lower_bound(problem), None)
        search_orders(found, list(fixed_schedules(problem)), Effort(2e7, inf))
        best = prove(problem, start=found.best, seconds=10).seconds
        assert found.step <= 1.02 * best, seed
