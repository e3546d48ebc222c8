"""Overlapped pairs in an order, where they pay."""

from random import Random

import pytest

from penstock.assembly import build
from penstock.checks.report import check
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.pairs import describe_pairs, in_lockstep, make_apart, with_pairs
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from tests.planner.problems import draw_problem
from tests.tables import orders_of, read_orders, read_schedule

GAIN = Costs(overlap_gain={"F+B": 0.6})


def loop(ranks: int, microbatches: int, costs: Costs = GAIN) -> SchedulingProblem:
    return SchedulingProblem.of(costs, Placement.loop(ranks), microbatches)


def test_in_lockstep_every_rank_has_two_that_do_not_wait_for_one_another() -> None:
    (schedule,) = in_lockstep(loop(2, 5))
    expected = """
        0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B (0F4;0B1)OVERLAP_F_B 0B2 0B3 0B4
        1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B (1F4;1B3)OVERLAP_F_B 1B4
    """
    problem = loop(2, 5, Costs(overlap_gain=1))
    assert orders_of(with_pairs(schedule, problem)) == read_orders(expected)


def test_a_plan_has_pairs_where_these_are_faster_than_any_order_without() -> None:
    # Without pairs a rank has 32 times 3 s of work, which begins after 3 s on the last one.
    found = solve(loop(4, 32), effort=0)
    assert found.seconds < 96
    check(found.schedule)
    (line,) = describe_pairs(found.timeline, GAIN, "everything")
    assert line == (
        "112 overlapped pairs save 18.6 s of a step (17.7 %) beside the same order without them"
    )
    assert line in str(found)


def test_pairs_that_save_nothing_stay_apart() -> None:
    problem = loop(4, 8, Costs(overlap_gain={"I+W": 0.5}))
    schedule = build("1F1B", ranks=4, microbatches=8)
    assert with_pairs(schedule, problem) == schedule


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 4, 5))]
)
def test_pairs_never_make_a_step_longer_and_keep_the_limit(seed: int) -> None:
    random = Random(seed)
    ranks = random.randint(2, 4)
    placement = random.choice((Placement.loop(ranks), Placement.v(ranks)))
    problem = draw_problem(random, placement, 8, capacity=random.choice((None, 2.5, 4)))
    gains = {pair: random.random() for pair in ("F+B", "F+I", "F+W", "W+B", "I+W")}
    costs = problem.costs.from_mapping(problem.costs.to_mapping() | {"overlap_gain": gains})
    problem = SchedulingProblem.of(costs, placement, 8, problem.memory)
    for schedule in fixed_schedules(problem):
        before = simulate(make_apart(schedule), costs)
        if max(a / b for a, b in zip(before.rank_peak_bytes, problem.memory, strict=True)) > 1:
            continue
        paired = with_pairs(make_apart(schedule), problem)
        check(paired)
        after = simulate(paired, costs)
        assert after.end_time <= before.end_time
        pairs = zip(after.rank_peak_bytes, problem.memory, strict=True)
        assert all(peak <= limit * (1 + 1e-9) for peak, limit in pairs)
        assert lower_bound(problem) <= after.end_time


# The forward of a tight pair was put first and left there, though it waits for the backward
# through another rank: a plan that could not run, and an error from the search.
def test_a_forward_that_waits_for_the_backward_before_it_stays_behind_it() -> None:
    costs = Costs(overlap_gain=0.5, activation_bytes=1)
    problem = SchedulingProblem.of(costs, Placement.loop(2), 3, memory=1)
    schedule = read_schedule("""
        0F0 0B0 0F1 0B1 0F2 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """)
    assert with_pairs(schedule, problem) == schedule
    assert solve(problem, effort=0).keeps_limit
