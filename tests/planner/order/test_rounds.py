"""More effort begins with all that less effort does."""

from itertools import islice, pairwise
from math import inf
from random import Random

import numpy as np
import pytest

from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import Effort
from penstock.planner.order.best_so_far import BestSoFar
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.rounds import BestOrders, Budget, round_sizes
from penstock.planner.order.search import search_orders
from penstock.planner.problem import SchedulingProblem
from tests.planner.problems import draw_problem


def found_with(problem: SchedulingProblem, rows: float) -> float:
    found = BestSoFar(problem, lower_bound(problem), None)
    search_orders(found, list(fixed_schedules(problem)), Effort(rows, inf))
    return found.step


# Whole backwards make the seconds of a built order differ from those of its step, and only a few
# microbatches are tried first where there are many.
@pytest.mark.parametrize(
    ("placement", "microbatches", "full_backward"),
    [(Placement.loop(3), 6, False), (Placement.loop(3), 6, True), (Placement.loop(2), 9, False)],
    ids=["split", "whole", "lengthened"],
)
def test_a_round_that_is_cut_off_anywhere_is_a_part_of_the_whole_round(
    placement: Placement, microbatches: int, full_backward: bool
) -> None:
    problem = draw_problem(
        Random(5), placement, microbatches, capacity=1.5, full_backward=full_backward
    )
    steps = [found_with(problem, rows) for rows in (0, 20_000, 27_000, 36_000, 45_000, 60_000)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(steps))


@pytest.mark.parametrize("rows_per_order", [1.0, 400.0, 2e6])
def test_whole_rounds_fill_a_second_unless_an_order_takes_too_long(rows_per_order: float) -> None:
    sizes = list(islice(round_sizes(3e6, rows_per_order), 30))
    sums = np.cumsum(sizes)
    assert sizes[0] >= 10 * rows_per_order
    assert sums[1:] == pytest.approx(5**0.5 * sums[:-1])
    assert np.isclose(sums, 3e6).any() == (rows_per_order < 3e5)


def test_a_purse_is_empty_once_its_rows_are_spent_but_not_in_the_first_round() -> None:
    problem = draw_problem(Random(0), Placement.loop(2), 3)
    budget = Budget(BestSoFar(problem, 0.0, None), Effort(10, inf))
    assert budget.spend(7)
    assert budget.spend(7)
    budget.end_first_round()
    assert budget.is_empty
    assert not budget.spend(1)


def test_best_orders_keep_every_order_that_was_the_best() -> None:
    best, order = BestOrders(), np.arange(3)
    for seconds in (3.0, 4.0, 2.0, 2.0):
        best.record(order, seconds)
        order[0] += 1
    assert [kept[0] for kept in best.orders] == [0, 2]
