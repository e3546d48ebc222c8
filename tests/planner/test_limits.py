"""Limits that allow the same orders give the same plan."""

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.limits import usable_capacity
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem


def every_sum(stages: list[tuple[float, float]], microbatches: int) -> Iterator[float]:
    """Yield the bytes of every number of activations and stashes that a rank may hold."""
    numbers = range(microbatches + 1)
    per_stage = [
        [
            held * activation + left * stash
            for held in numbers
            for left in numbers[: len(numbers) - held]
        ]
        for activation, stash in stages
    ]
    yield from map(sum, product(*per_stage))


@pytest.mark.parametrize("seed", range(20))
def test_usable_capacity_is_the_largest_sum_of_bytes_that_fits(seed: int) -> None:
    random = Random(seed)
    for _ in range(10):
        microbatches = random.randint(1, 4)
        stages = [
            (random.randint(0, 16) / 8, random.randint(0, 20) / 8)
            for _ in range(random.randint(1, 2))
        ]
        capacity = random.randint(0, 80) / 8
        most = max(held for held in every_sum(stages, microbatches) if held <= capacity)
        assert usable_capacity(capacity, stages, microbatches) == pytest.approx(most, rel=1e-12)


def test_what_fits_but_for_its_last_bit_is_usable() -> None:
    assert usable_capacity(0.3, [(0.1, 0.0)], 8) == pytest.approx(0.3)


def test_capacity_of_many_uneven_stages_is_left_unchanged() -> None:
    stages = [(1.0 + number / 97, 0.5) for number in range(6)]
    assert usable_capacity(50.0, stages, 64) == 50.0


# More bytes that no order could use changed the plan: guesses and bounds were made from the limit
# itself, and not from what fits into it.
@pytest.mark.parametrize("limits", [(30.0, 31.0, 31.9), (128.0, 500.0, None)])
def test_limits_between_two_sums_give_the_same_plan(limits: tuple[float | None, ...]) -> None:
    costs = Costs([1, 2, 1, 1.5], transfer=0.3, activation_bytes=10, weight_stash_bytes=6)
    placement = Placement.loop(4)
    problems = [
        SchedulingProblem.of(costs.for_each_stage(4), placement, 9, memory=limit)
        for limit in limits
    ]
    first, *others = [solve(problem, effort=3_000) for problem in problems]
    for found in others:
        assert (found.schedule, found.lower_bound) == (first.schedule, first.lower_bound)
