"""No order of a tiny problem beats its bound, whatever costs there are, drawn at random.

Every order that keeps the limit is simulated, some with pairs, or a sample of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from penstock.costs import Costs
from penstock.errors import DeadlockError
from penstock.ir.actions import Action
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import BOUNDARIES
from tests.planner.every_order import all_orders
from tests.strategies import join_at

SIZES = (
    (Placement.loop(1), 2),
    (Placement.loop(2), 1),
    (Placement.loop(2), 2),
    (Placement.loop(3), 1),
    (Placement.loop(2, 2), 1),
    (Placement.v(2), 1),
    (Placement((0, 1, 0)), 1),
)
GAINS = (0.3, 1.0, {"F+B": 0.5}, {"F+W": 0.7, "I+W": 0.3}, {"F+I": 1.0})
MOST_ORDERS = 300


def draw_costs(random: Random, placement: Placement, microbatches: int) -> Costs:
    """Draw costs of all kinds, each of which may be missing; numbers are eighths of a second."""
    ranks, stages = placement.num_ranks, placement.num_stages

    def draw(low: int, high: int) -> tuple[float, ...]:
        return tuple(random.randint(low, high) / 8 for _ in range(stages))

    forward, backward, weight, activation = draw(1, 24), draw(2, 24), draw(0, 24), draw(1, 16)
    both = zip(backward, weight, strict=True)
    maybe: dict[str, object] = {
        "full_backward": tuple((i + w) * random.choice((0.5, 0.75, 1, 1.25)) for i, w in both),
        "send": random.randint(0, 4) / 8,
        "host_action": random.randint(0, 8) / 8,
        "host_message": random.randint(0, 8) / 8,
        "unshard": draw(0, 24),
        "reshard": draw(0, 24),
        "reduce_grad": draw(0, 24),
        "collective_overlap": random.choice((0.0, 0.25, 0.5, 0.75)),
        "wires": [random.randint(0, 1) for _ in range(ranks)],
        "microbatch_scale": [random.randint(1, 16) / 8 for _ in range(microbatches)],
        "message_bytes": draw(0, 4),
        "workspace_bytes": draw(0, 4),
        "overlap_gain": random.choice(GAINS),
    }
    return Costs.from_mapping(
        {
            "forward": forward,
            "backward_input": backward,
            "backward_weight": weight,
            "transfer": [[random.randint(0, 8) / 8 for _ in range(ranks)] for _ in range(ranks)],
            "activation_bytes": activation,
            "weight_stash_bytes": [random.choice((0, 0.5, 1, 1.5)) * size for size in activation],
        }
        | {name: value for name, value in maybe.items() if random.random() < 0.4}
    )


def draw_problem(random: Random) -> SchedulingProblem:
    """Draw a tiny problem, with a limit or without one."""
    placement, microbatches = random.choice(SIZES)
    costs, boundary = draw_costs(random, placement, microbatches), random.choice(BOUNDARIES)
    free = SchedulingProblem.of(costs, placement, microbatches, boundary=boundary)
    factor = random.choice((inf, 1, 1.25, 1.5, 2))
    pairs = zip(free.least_bytes.tolist(), free.resident.tolist(), strict=True)
    return replace(free, memory=tuple(factor * (least - held) + held for least, held in pairs))


def steps(problem: SchedulingProblem, random: Random) -> Iterator[float]:
    """Yield the seconds of orders that finish and keep the limit."""
    choices = list(product(*all_orders(problem, with_merged=random.random() < 0.5)))
    for choice in random.sample(choices, min(MOST_ORDERS, len(choices))):
        orders = [[Action(*step) for step in order] for order in choice]
        schedule = Schedule.from_orders(orders, dataflow=problem.dataflow)
        if problem.costs.overlap_gain:
            for _ in range(2):
                schedule = join_at(schedule, random.randrange(len(schedule.rows)))
        try:
            timeline = simulate(schedule, problem.costs)
        except DeadlockError:
            continue
        pairs = zip(timeline.rank_peak_bytes, problem.memory, strict=True)
        if all(peak <= limit * (1 + 1e-9) for peak, limit in pairs):
            yield timeline.period(problem.boundary)


def check_bound(seed: int) -> None:
    random = Random(seed)
    problem = draw_problem(random)
    bound = lower_bound(problem)
    assert bound <= min(steps(problem, random), default=inf) * (1 + 1e-9)
    looser = replace(problem, memory=tuple(1.3 * limit for limit in problem.memory))
    assert lower_bound(looser) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_beats_the_bound_whatever_costs_there_are(seed: int) -> None:
    check_bound(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_no_order_of_1000_problems_beats_the_bound(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        check_bound(seed)


@pytest.mark.slow
def test_plans_of_200_problems_keep_their_bound_limit_and_prediction() -> None:
    for seed in range(200):
        problem = draw_problem(Random(seed))
        found = solve(problem, effort=0)
        again = simulate(found.schedule, problem.costs).period(problem.boundary)
        assert found.lower_bound * (1 - 1e-9) <= found.seconds == again
        assert found.keeps_limit
