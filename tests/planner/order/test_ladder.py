"""More memory, more effort and fewer constraints are never worse; the same effort gives the same.

The ladder of limits makes it so: what a tighter limit finds, a looser one finds as well.
"""

from dataclasses import replace
from random import Random

import pytest

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.order.ladder import find_rungs
from penstock.planner.order.solver import solve
from penstock.planner.planning import plan
from penstock.planner.problem import SchedulingProblem
from penstock.sim.period import BOUNDARIES
from tests.planner.problems import draw_problem

# Rounding of times that are sums of many numbers.
ROUNDING = 1 + 1e-9


def draw(seed: int) -> tuple[SchedulingProblem, float]:
    """Draw a problem that is too large for a proof, and how much more memory to give it."""
    random = Random(seed)
    ranks = random.randint(3, 6)
    style = random.choice((Placement.loop, Placement.v))
    placement = style(ranks, random.choice((1, 2)) if style is Placement.loop else 2)
    problem = draw_problem(
        random,
        placement,
        random.randint(9, 3 * ranks + 6),
        room=random.uniform(1, 1.5 * ranks),
        full_backward=random.random() < 0.3,
        boundary=random.choice(BOUNDARIES),
    )
    return problem, random.choice((1.01, 1.1, 1.3, 2.0))


def require_never_worse(seed: int, effort: float) -> None:
    """Require that more memory, more effort and both are no slower."""
    problem, more = draw(seed)
    looser = replace(problem, memory=tuple(more * limit for limit in problem.memory))
    tight, loose, longer, both = (
        solve(one, effort=work) for work in (effort, 2.5 * effort) for one in (problem, looser)
    )
    assert loose.seconds <= tight.seconds * ROUNDING, seed
    assert longer.seconds <= tight.seconds * ROUNDING, seed
    assert both.seconds <= min(longer.seconds, loose.seconds) * ROUNDING, seed


@pytest.mark.parametrize("seed", range(5))
def test_more_memory_and_more_effort_are_never_worse(seed: int) -> None:
    # A V had plans that were slower by up to 1.2 % with more memory.
    require_never_worse(seed, 15_000)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_more_memory_and_more_effort_are_never_worse_on_500_problems(first: int) -> None:
    pytest.importorskip("numba")
    for seed in range(first, first + 50):
        require_never_worse(seed, 400_000)


def test_rungs_do_not_depend_on_the_limit() -> None:
    problem = draw_problem(Random(1), Placement.loop(4), 12, room=2)
    looser = replace(problem, memory=tuple(1.37 * limit for limit in problem.memory))
    tight, loose = find_rungs(problem), find_rungs(looser)
    assert [rung.memory for rung in tight] == [rung.memory for rung in loose]
    assert sum(rung.is_within for rung in tight) < sum(rung.is_within for rung in loose)
    assert tight[0].is_within


def test_limits_per_rank_keep_their_proportion() -> None:
    costs = Costs(activation_bytes=1, parameter_bytes=[5, 1])
    problem = SchedulingProblem.of(costs, Placement.loop(2), 6, memory=[12, 6])
    for rung in find_rungs(problem):
        assert rung.memory[0] == pytest.approx(2 * rung.memory[1])
        assert rung.memory[0] >= 5 + rung.microbatches


def test_without_bytes_there_is_one_rung() -> None:
    assert len(find_rungs(SchedulingProblem.of(Costs(), Placement.v(4), 8))) == 1


def test_the_same_effort_gives_the_same_schedule() -> None:
    problem, _ = draw(3)
    one, other = (solve(problem, effort=15_000) for _ in range(2))
    assert one.schedule == other.schedule
    assert not one.is_cut_short


def test_a_named_placement_is_never_better_than_the_choice() -> None:
    costs = Costs(1.0, 1.2, 0.7, transfer=0.1, activation_bytes=3, weight_stash_bytes=1)
    free = plan(costs, ranks=4, microbatches=10, memory=9, effort=60_000)
    for placement in ("loop", "interleaved", "v"):
        named = plan(costs, ranks=4, microbatches=10, memory=9, placement=placement, effort=60_000)
        assert free.seconds <= named.seconds * ROUNDING
