"""Greedy rules give orders that keep the limit, and the classic schedules are among them."""

from random import Random

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.builder import Builder, Built
from penstock.planner.order.greedy import greedy_guesses
from penstock.planner.order.guesses import Guesser
from penstock.planner.order.queues import Queues
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from tests.planner.problems import draw_problem


def build_all(problem: SchedulingProblem) -> list[Built]:
    """Return the orders of all greedy guesses that do not get stuck."""
    queues = Queues(problem)
    builder = Builder(queues, is_compiled=False)
    guesser = Guesser(queues, Random(0), lower_bound(problem))
    built = (builder.build(guess.urgency, guess.policy) for guess in greedy_guesses(guesser))
    return [one for one in built if one is not None]


@pytest.mark.parametrize("placement", [Placement.loop(3), Placement.v(3)])
def test_greedy_orders_keep_the_limit(placement: Placement) -> None:
    problem = draw_problem(Random(4), placement, 5, capacity=2)
    orders = build_all(problem)
    assert orders
    for built in orders:
        schedule = Queues(problem).to_schedule(built.order, "greedy")
        peaks = simulate(schedule, problem.costs).rank_peak_bytes
        pairs = zip(peaks, problem.memory, strict=True)
        assert all(peak <= limit * (1 + 1e-9) for peak, limit in pairs)


@pytest.mark.parametrize("memory", [3, 6])
def test_the_best_greedy_order_is_faster_than_1f1b(memory: float) -> None:
    costs = Costs(activation_bytes=1, weight_stash_bytes=1)
    problem = SchedulingProblem.of(costs, Placement.loop(3), 6, memory=memory)
    end = simulate(build("1F1B", ranks=3, microbatches=6), costs).end_time
    assert min(built.seconds for built in build_all(problem)) < end
