"""More memory and more effort never make an answer worse."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.order.solver import solve
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.sim.period import BOUNDARIES
from tests.planner.problems import draw_problem

# Rounding of times that are sums of many numbers.
ROUNDING = 1 + 1e-9


def draw(seed: int) -> tuple[SchedulingProblem, SchedulingProblem]:
    """Draw a problem with uneven costs and a limit, and the same with more memory."""
    random = Random(seed)
    ranks = random.randint(2, 8)
    style = random.choice((Placement.loop, Placement.v))
    placement = style(ranks, random.choice((1, 1, 2)) if style is Placement.loop else 2)
    problem = draw_problem(
        random,
        placement,
        random.randint(3, 3 * ranks + 4),
        capacity=random.uniform(1, 1.5 * ranks),
        full_backward=random.random() < 0.3,
        boundary=random.choice(BOUNDARIES),
    )
    more = random.choice((1.01, 1.05, 1.1, 1.3, 2.0))
    return problem, replace(problem, memory=tuple(more * limit for limit in problem.memory))


def check_never_worse(seed: int, *efforts: float) -> None:
    problem, looser = draw(seed)
    found = [solve(problem, effort=effort) for effort in efforts]
    for less, more in pairwise(found):
        assert more.seconds <= less.seconds * ROUNDING, "more effort"
    known = solve(looser, effort=efforts[0], known=[found[-1].schedule])
    assert known.seconds <= found[-1].seconds * ROUNDING, "more memory"


@pytest.mark.parametrize("seed", [42, 66])
def test_more_memory_and_more_effort_are_never_worse(seed: int) -> None:
    check_never_worse(seed, 0, 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_more_memory_and_more_effort_are_never_worse_for_500_problems(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        check_never_worse(seed, 30_000, 70_000, 300_000)


def test_a_known_plan_for_a_tighter_limit_is_a_guess_for_a_looser_one() -> None:
    costs = Costs(1.0, 1.2, 0.7, transfer=0.1, activation_bytes=3, weight_stash_bytes=1)

    def solved(memory: float, effort: float, *known: Plan) -> Plan:
        return plan(
            costs,
            ranks=3,
            microbatches=9,
            memory=memory,
            placement="loop",
            effort=effort,
            known=known,
        )

    tight = solved(7, 20_000)
    loose = solved(8, 0, tight)
    assert loose.seconds <= tight.seconds
    # A limit that a known plan does not keep is kept all the same.
    assert solved(5, 0, tight, loose).keeps_limit


def test_known_plans_of_other_sizes_are_left_out() -> None:
    few = plan(Costs(), ranks=2, microbatches=4, effort=0)
    many = plan(Costs(), ranks=2, microbatches=6, effort=0, known=[few])
    assert many.schedule.microbatches == 6


def test_a_known_plan_of_another_placement_is_kept_if_it_is_fastest() -> None:
    costs = Costs([1, 3, 1, 3], transfer=0.1)
    placement = Placement((0, 1, 1, 0))
    known = plan(costs, ranks=2, microbatches=4, placement=placement, effort=10_000)
    free = plan(costs, ranks=2, microbatches=4, effort=0, known=[known])
    assert free.seconds <= known.seconds
