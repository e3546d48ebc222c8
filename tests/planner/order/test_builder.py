from importlib.util import find_spec
from random import Random

import numpy as np
import pytest

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.builder import Builder, Policy
from penstock.planner.order.guesses import Guess, Guesser
from penstock.planner.order.queues import Queues
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from tests.planner.problems import draw_problem

PLACEMENTS = (
    Placement.loop(1),
    Placement.loop(4),
    Placement.loop(3, 2),
    Placement.v(4),
    Placement((0, 1, 1, 2, 0)),
)
CAPACITIES = (None, 1.0, 1.5, 3.0)
EAGER = Policy(patience=0.0, overrun=1.0, allowance=0.0, is_late=True)


def guesses(problem: SchedulingProblem, seed: int, number: int) -> list[Guess]:
    guesser = Guesser(Queues(problem), Random(seed), lower_bound(problem))
    return [guesser.one_at_a_time(), *(guesser.guess() for _ in range(number))]


def build_text(problem: SchedulingProblem, offsets: list[float], policy: Policy) -> list[str]:
    """Build an order in which the urgency of work is its queue's offset plus its microbatch."""
    queues = Queues(problem)
    urgency = np.add.outer(offsets, np.arange(problem.microbatches, dtype=np.float64))
    built = Builder(queues, is_compiled=False).build(urgency, policy)
    assert built is not None
    return [" ".join(map(str, works)) for works in queues.to_schedule(built.order, "").orders]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_whatever_is_built_is_complete_and_keeps_the_limit(
    placement: Placement, capacity: float | None
) -> None:
    for seed in range(5):
        problem = draw_problem(Random(seed), placement, 5, capacity=capacity)
        queues = Queues(problem)
        for guess in guesses(problem, seed, 8):
            built = Builder(queues, is_compiled=False).build(guess.urgency, guess.policy)
            if built is None:
                continue
            schedule = queues.to_schedule(built.order, "built")
            check(schedule)
            timeline = simulate(schedule, problem.costs)
            assert all(np.array(timeline.rank_peak_bytes) <= problem.memory)
            # A rank may have waited for something that it then did not do.
            assert timeline.end_time <= built.seconds
            assert built.mean <= built.seconds


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_one_microbatch_at_a_time_fits_into_the_least_memory(placement: Placement) -> None:
    for seed in range(10):
        problem = draw_problem(Random(seed), placement, 4, capacity=100)
        least = np.bincount(placement.rank_of_stage, problem.activation)
        tight = SchedulingProblem.of(problem.costs, placement, 4, least.tolist())
        guess = guesses(tight, seed, 0)[0]
        assert Builder(Queues(tight), is_compiled=False).build(guess.urgency, guess.policy)


@pytest.mark.skipif(find_spec("numba") is None, reason="numba compiles the loops")
def test_compiled_loops_build_the_same() -> None:
    for seed, placement in enumerate(PLACEMENTS):
        problem = draw_problem(Random(seed), placement, 6, capacity=2.5)
        plain, compiled = (Builder(Queues(problem), is_compiled=flag) for flag in (False, True))
        for guess in guesses(problem, seed, 10):
            one = plain.build(guess.urgency, guess.policy)
            other = compiled.build(guess.urgency, guess.policy)
            if one is None or other is None:
                assert one is other
                continue
            assert (one.seconds, one.mean) == (other.seconds, other.mean)
            assert (one.order == other.order).all()
            assert (one.start == other.start).all()


def test_a_rank_runs_ahead_as_far_as_its_memory_allows() -> None:
    costs = Costs(activation_bytes=1, weight_stash_bytes=1)
    problem = SchedulingProblem.of(costs, Placement.loop(2), 4, memory=3)
    # One microbatch after the other in line; F overtakes while the first rank waits.
    text = build_text(problem, [0, 0.1, 0.4, 0.3, 0.5, 0.5], EAGER)
    assert text == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3",
    ]


def test_weight_work_makes_room_where_it_must_and_fills_gaps_where_it_can() -> None:
    costs = Costs(activation_bytes=1, weight_stash_bytes=0.5)
    problem = SchedulingProblem.of(costs, Placement.loop(2), 4, memory=2)
    text = build_text(problem, [0, 0.1, 0.4, 0.3, 99, 99], EAGER)
    assert text == [
        "0F0 0F1 0I0 0W0 0I1 0F2 0W1 0F3 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1F3 1I3 1W2 1W3",
    ]


def test_a_patient_rank_waits_for_what_is_more_urgent() -> None:
    # When rank 0 could start F3, I0 is on its way and comes before F3 would be over.
    costs = Costs(forward=(1.25, 1), transfer=0.5)
    problem = SchedulingProblem.of(costs, Placement.loop(2), 4)
    offsets = [0, 0.1, 0.4, 0.3, 99, 99]
    patient = Policy(patience=1.0, overrun=0.0, allowance=99.0, is_late=True)
    spent = Policy(patience=1.0, overrun=0.0, allowance=0.0, is_late=True)
    begins = [build_text(problem, offsets, policy)[0][:15] for policy in (patient, spent)]
    assert begins == ["0F0 0F1 0F2 0I0", "0F0 0F1 0F2 0F3"]


def test_order_that_cannot_fit_is_not_built() -> None:
    # All forwards first need room for all of them, whatever overtakes what.
    costs = Costs(activation_bytes=1)
    problem = SchedulingProblem(costs, Placement.loop(1), 3, (0.5,))
    urgency = np.zeros((3, 3))
    assert Builder(Queues(problem), is_compiled=False).build(urgency, EAGER) is None
