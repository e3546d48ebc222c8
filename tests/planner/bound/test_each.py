"""Bounds and solutions with host seconds, collectives, and microbatches of different size."""

from dataclasses import replace
from random import Random

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.exact.prove import prove
from penstock.planner.order.anneal import anneal
from penstock.planner.order.builder import Builder, Policy
from penstock.planner.order.guesses import urgency_of
from penstock.planner.order.queues import Longs, Queues
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary
from tests.planner.every_order import least_seconds
from tests.planner.problems import draw_problem

BOUNDARIES: tuple[Boundary, ...] = ("everything", "nothing", "papers")
SCALES = {1: (1.5,), 2: (0.5, 2.0), 3: (2.0, 0.25, 1.0)}


def draw(
    seed: int, placement: Placement, microbatches: int, capacity: float | None, boundary: Boundary
) -> SchedulingProblem:
    """Draw a problem with host seconds and microbatches of different size."""
    random = Random(seed)
    even = draw_problem(random, placement, microbatches, capacity=None, boundary=boundary)
    costs = replace(
        even.costs,
        microbatch_scale=SCALES[microbatches],
        host_action=random.randint(0, 4) / 8,
        host_message=random.randint(0, 4) / 8,
    )
    free = SchedulingProblem.of(costs, placement, microbatches, boundary=boundary)
    if capacity is None:
        return free
    memory = [capacity * float(least) for least in free.least_bytes]
    return SchedulingProblem.of(costs, placement, microbatches, memory, boundary=boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("capacity", [None, 1, 1.5])
@pytest.mark.parametrize(
    ("placement", "microbatches"),
    [
        (Placement.loop(1), 3),
        (Placement.loop(2), 2),
        (Placement.v(2), 1),
        (Placement((0, 1, 0)), 1),
    ],
    ids=str,
)
def test_no_order_of_uneven_microbatches_beats_the_bound(
    placement: Placement, microbatches: int, capacity: float | None, boundary: Boundary
) -> None:
    for seed in range(3):
        problem = draw(seed, placement, microbatches, capacity, boundary)
        best = least_seconds(problem, with_merged=microbatches < 3)
        assert lower_bound(problem) <= best
        assert lower_bound(problem) >= 0.6 * best


# Where each rank has its own span, the solver's bound may stay below the best order to the end.
@pytest.mark.parametrize(
    "boundary",
    ["everything", *(pytest.param(each, marks=pytest.mark.slow) for each in BOUNDARIES[1:])],
)
@pytest.mark.parametrize("capacity", [None, 1, 1.5])
def test_exact_answers_of_uneven_microbatches_are_the_best_of_all_orders(
    capacity: float | None, boundary: Boundary
) -> None:
    pytest.importorskip("ortools")
    for seed in range(3):
        problem = draw(seed, Placement.loop(2), 2, capacity, boundary)
        best = least_seconds(problem, with_merged=True)
        exact = prove(problem, seconds=20)
        assert exact.lower_bound <= best * (1 + 1e-9)
        if boundary != "papers":
            assert exact.seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_no_family_beats_the_bound_with_every_new_cost(boundary: Boundary, overlap: float) -> None:
    for family, ranks, microbatches in (("1F1B", 4, 6), ("ZBV", 3, 6), ("ZB-H1", 4, 8)):
        schedule = build(family, ranks=ranks, microbatches=microbatches)
        costs = Costs(
            transfer=0.25,
            host_action=0.125,
            host_message=0.0625,
            unshard=0.75,
            reshard=0.125,
            reduce_grad=1.5,
            collective_overlap=overlap,
            wires=[0, 0, 1, 1][:ranks],
            microbatch_scale=[1 + (number % 3) / 2 for number in range(microbatches)],
        )
        problem = SchedulingProblem.of(costs, schedule.placement, microbatches, boundary=boundary)
        step = simulate(schedule, costs).period(boundary)
        assert lower_bound(problem) <= step
        if family == "ZBV" and overlap == 0.5:
            plan = solve(problem, seconds=0.1)
            assert plan.seconds == simulate(plan.schedule, costs).period(boundary)
            assert plan.lower_bound <= plan.seconds <= step


def test_reduction_may_run_beside_a_reshard_that_occupies_the_rank() -> None:
    # Half of each is beside compute: the bound once put them in a row, which takes 2 seconds.
    schedule = build("1F1B", ranks=1, microbatches=2)
    costs = Costs(reshard=1.5, reduce_grad=0.5, collective_overlap=0.5)
    problem = SchedulingProblem.of(costs, schedule.placement, 2)
    assert simulate(schedule, costs).end_time == 6 + 1.75
    assert lower_bound(problem) == pytest.approx(6 + 1.25)


def test_papers_do_not_count_gathering_before_the_first_forward() -> None:
    schedule = build("1F1B", ranks=1, microbatches=2)
    costs = Costs(unshard=1, reduce_grad=0.5, collective_overlap=0)
    problem = SchedulingProblem.of(costs, schedule.placement, 2, boundary="papers")
    assert simulate(schedule, costs).period("papers") == 6.5
    assert lower_bound(problem) == pytest.approx(6.5)


def test_host_seconds_are_part_of_a_tight_bound() -> None:
    # One rank: every F, I and W takes a host second too, or every F and B.
    problem = SchedulingProblem.of(Costs(host_action=1), Placement.loop(1), 4)
    assert lower_bound(problem) == pytest.approx(4 * (3 + 2))
    assert solve(problem, seconds=0.2).gap == 0


@pytest.mark.parametrize("is_compiled", [False, True])
def test_loops_of_the_planner_agree_with_the_simulator(is_compiled: bool) -> None:
    if is_compiled:
        pytest.importorskip("numba")
    for seed, placement in enumerate((Placement.loop(2), Placement.v(2))):
        problem = draw(seed, placement, 3, None, "everything")
        queues = Queues(problem)
        name = "ZBV" if placement == Placement.v(2) else "ZB-H1"
        known = build(name, ranks=2, microbatches=3)
        policy = Policy(1.0, 0.0, float("inf"), is_late=False)
        built = Builder(queues, is_compiled).build(urgency_of(known, problem.costs), policy)
        assert built is not None
        timeline = simulate(queues.to_schedule(built.order, "built"), problem.costs)
        assert built.seconds == pytest.approx(timeline.end_time)
        seen: list[float] = []
        shares = iter((0.0, 0.5, 1.0))

        def progress(
            best: float, _order: Longs, seen: list[float] = seen, shares: object = shares
        ) -> float:
            seen.append(best)
            return next(shares)  # type: ignore[call-overload, no-any-return]  # an iterator

        order = anneal(queues, built.order, is_compiled=is_compiled, progress=progress)
        timeline = simulate(queues.to_schedule(order, "annealed"), problem.costs)
        assert seen[-1] == pytest.approx(timeline.end_time)
