from collections.abc import Callable
from random import Random

import pytest

from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.builder import Builder
from penstock.planner.order.climb import ImprovedOrder, climb, try_out
from penstock.planner.order.guesses import Guesser
from penstock.planner.order.queues import Queues
from tests.planner.problems import draw_problem


def for_orders(number: int) -> Callable[[ImprovedOrder], bool]:
    """Return a function that allows this number of orders."""
    left = number

    def may_continue(_best: ImprovedOrder) -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    return may_continue


def improve(placement: Placement, seed: int, orders: int) -> tuple[float, ImprovedOrder]:
    """Return the step of the best guess, and the best after this number of further orders."""
    problem = draw_problem(Random(seed), placement, 6, capacity=2)
    queues, random = Queues(problem), Random(0)
    guesser = Guesser(queues, random, lower_bound(problem))
    builder = Builder(queues, is_compiled=False)
    guesses = [guesser.one_at_a_time(), *(guesser.guess() for _ in range(10))]
    candidates = try_out(builder, guesses, for_orders(100))
    least = min(candidate.built.seconds for candidate in candidates)
    return least, climb(builder, candidates, random, for_orders(orders))[0]


@pytest.mark.parametrize("placement", [Placement.loop(3), Placement.v(3), Placement.loop(3, 2)])
def test_climbing_never_loses_to_the_best_guess_and_often_wins(placement: Placement) -> None:
    gains = []
    for seed in range(5):
        before, best = improve(placement, seed, 60)
        gains.append(before - best.built.seconds)
    assert min(gains) >= 0
    assert max(gains) > 0


def test_the_same_number_of_orders_gives_the_same_order() -> None:
    found = [improve(Placement.v(3), 3, 40)[1].built.order.tolist() for _ in range(2)]
    assert found[0] == found[1]


def test_no_more_guesses_are_tried_once_it_is_enough() -> None:
    problem = draw_problem(Random(0), Placement.loop(3), 4)
    guesser = Guesser(Queues(problem), Random(0), lower_bound(problem))
    guesses = iter([guesser.one_at_a_time() for _ in range(5)])
    builder = Builder(Queues(problem), is_compiled=False)
    assert len(try_out(builder, guesses, for_orders(2))) == 3
    assert len(list(guesses)) == 2
