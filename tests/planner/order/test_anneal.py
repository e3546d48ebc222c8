from importlib.util import find_spec
from random import Random

import numpy as np
import pytest

from penstock.checks.report import check
from penstock.ir.placement import Placement
from penstock.planner.order.anneal import anneal
from penstock.planner.order.builder import Builder
from penstock.planner.order.guesses import Guesser
from penstock.planner.order.queues import Longs, Queues
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from tests.planner.every_order import least_seconds
from tests.planner.problems import draw_problem


def first_order(problem: SchedulingProblem) -> Longs:
    queues = Queues(problem)
    guess = Guesser(queues, Random(0), 0.0).one_at_a_time()
    built = Builder(queues, is_compiled=False).build(guess.urgency, guess.policy)
    assert built is not None
    return built.order


def annealed(problem: SchedulingProblem, *, rounds: int, is_compiled: bool = False) -> Longs:
    """Return the order after this number of rounds of moves."""
    parts = iter(np.linspace(0, 1, rounds + 1))
    return anneal(
        Queues(problem),
        first_order(problem),
        is_compiled=is_compiled,
        progress=lambda _step, _order: float(next(parts)),
    )


def seconds_of(problem: SchedulingProblem, order: Longs) -> float:
    return simulate(Queues(problem).to_schedule(order, ""), problem.costs).end_time


@pytest.mark.parametrize("capacity", [None, 1.0, 2.0])
@pytest.mark.parametrize("placement", [Placement.loop(3), Placement.v(2)])
def test_the_best_order_on_the_way_is_allowed_and_no_slower(
    placement: Placement, capacity: float | None
) -> None:
    for seed in range(3):
        problem = draw_problem(Random(seed), placement, 4, capacity=capacity)
        order = annealed(problem, rounds=1)
        schedule = Queues(problem).to_schedule(order, "")
        check(schedule)
        timeline = simulate(schedule, problem.costs)
        assert all(np.array(timeline.rank_peak_bytes) <= problem.memory)
        assert timeline.end_time <= seconds_of(problem, first_order(problem))


def test_annealing_times_orders_as_the_simulator_does() -> None:
    for seed in range(3):
        problem = draw_problem(Random(seed), Placement.v(2), 4, capacity=2.0)
        seen: list[float] = []

        def progress(step: float, _order: Longs, seen: list[float] = seen) -> float:
            seen.append(step)
            return len(seen) / 3

        order = anneal(Queues(problem), first_order(problem), is_compiled=False, progress=progress)
        assert seconds_of(problem, order) == pytest.approx(seen[-1])


def test_moves_find_the_best_order_of_a_tiny_problem() -> None:
    for seed in range(3):
        problem = draw_problem(Random(seed), Placement.loop(2), 2, capacity=1.5)
        order = annealed(problem, rounds=2)
        assert seconds_of(problem, order) == pytest.approx(least_seconds(problem))


@pytest.mark.skipif(find_spec("numba") is None, reason="numba compiles the loop")
def test_the_compiled_loop_makes_the_same_moves() -> None:
    problem = draw_problem(Random(4), Placement.v(3), 4, capacity=2)
    plain, compiled = (annealed(problem, rounds=2, is_compiled=flag) for flag in (False, True))
    assert (plain == compiled).all()
