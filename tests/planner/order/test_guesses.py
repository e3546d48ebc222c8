from math import inf
from random import Random

import numpy as np
import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.builder import Builder, Policy
from penstock.planner.order.guesses import Guess, Guesser, lengthen, urgency_of
from penstock.planner.order.queues import Queues
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from tests.planner.problems import draw_problem

PLACEMENTS = (Placement.loop(4), Placement.v(4), Placement.loop(2, 2), Placement((0, 1, 1, 0, 2)))
LETTER = Policy(patience=1.0, overrun=0.0, allowance=inf, is_late=False)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_in_every_guess_microbatches_come_in_order_and_after_what_they_need(
    placement: Placement,
) -> None:
    for seed in range(20):
        problem = draw_problem(Random(seed), placement, 6, capacity=2)
        guesser = Guesser(Queues(problem), Random(seed), lower_bound(problem))
        for guess in (guesser.one_at_a_time(), guesser.guess()):
            assert guess.urgency.shape == (3 * placement.num_stages, 6)
            assert (np.diff(guess.urgency) > 0).all()
            _, backward, weight = np.split(guess.urgency, 3)
            assert (weight >= backward).all()


def test_the_same_random_numbers_give_the_same_guesses() -> None:
    problem = draw_problem(Random(1), Placement.v(3), 5, capacity=2)
    one, other = (Guesser(Queues(problem), Random(7), lower_bound(problem)) for _ in range(2))
    for _ in range(10):
        first, second = one.guess(), other.guess()
        assert (first.urgency == second.urgency).all()
        assert first.policy == second.policy


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "ZB-H2"])
def test_a_known_schedule_is_followed_to_the_letter(name: str) -> None:
    problem = SchedulingProblem.of(Costs(), Placement.loop(4), 8)
    schedule = build(name, ranks=4, microbatches=8)
    queues = Queues(problem)
    built = Builder(queues, is_compiled=False).build(urgency_of(schedule, problem.costs), LETTER)
    assert built is not None
    assert built.seconds <= simulate(schedule, problem.costs).end_time


def test_overlapped_work_of_a_known_schedule_comes_one_after_the_other() -> None:
    problem = SchedulingProblem.of(Costs(), Placement.v(4), 8)
    urgency = urgency_of(build("DualPipeV", ranks=4, microbatches=8), problem.costs)
    assert Builder(Queues(problem), is_compiled=False).build(urgency, LETTER) is not None


def test_more_microbatches_come_in_the_middle_at_the_same_pace() -> None:
    few = Guess(np.array([[0.0, 1, 2, 4, 6, 8, 9, 10], [3, 4, 5, 7, 9, 11, 12, 13]]), LETTER)
    assert lengthen(few, 10).urgency.tolist() == [
        [0, 1, 2, 4, 6, 8, 10, 12, 13, 14],
        [3, 4, 5, 7, 9, 11, 13, 15, 16, 17],
    ]
