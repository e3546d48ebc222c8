"""Exact answers are the best there are, keep every limit, and say what is proven."""

import subprocess
import sys
from random import Random

import pytest

from penstock.assembly import build
from penstock.checks.report import check
from penstock.costs import Costs
from penstock.errors import MissingDependencyError
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.exact.prove import Exact, prove
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary
from tests.planner.every_order import least_seconds
from tests.planner.problems import draw_problem

TINY = (
    (Placement.loop(1), 3),
    (Placement.loop(2), 2),
    (Placement.loop(2, 2), 1),
    (Placement.v(2), 1),
    (Placement((0, 1, 0)), 1),
)
CAPACITIES = (None, 1, 1.25, 1.5, 2)


def verify(problem: SchedulingProblem, exact: Exact) -> None:
    """Require that the claims about the schedule are true."""
    check(exact.schedule)
    timeline = simulate(exact.schedule, problem.costs)
    assert timeline.period(problem.boundary) == exact.seconds
    assert all(
        peak <= most for peak, most in zip(timeline.rank_peak_bytes, problem.memory, strict=True)
    )
    assert exact.lower_bound <= exact.seconds * (1 + 1e-12)


@pytest.mark.parametrize("boundary", ["everything", "nothing", "papers"])
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("placement", "microbatches"), TINY, ids=str)
def test_the_answer_is_the_best_of_all_orders(
    placement: Placement, microbatches: int, capacity: float | None, boundary: Boundary
) -> None:
    for seed in range(3):
        problem = draw_problem(
            Random(seed), placement, microbatches, capacity=capacity, boundary=boundary
        )
        exact = prove(problem)
        verify(problem, exact)
        assert exact.is_optimal
        assert exact.seconds == pytest.approx(least_seconds(problem))


@pytest.mark.parametrize("capacity", [None, 1, 1.5])
def test_a_shorter_whole_backward_is_used_where_it_helps(capacity: float | None) -> None:
    for seed in range(3):
        problem = draw_problem(
            Random(seed), Placement.loop(2), 2, capacity=capacity, full_backward=True
        )
        exact = prove(problem)
        verify(problem, exact)
        assert exact.is_optimal
        assert exact.seconds == pytest.approx(least_seconds(problem, with_merged=True))


def test_whole_backward_is_used_without_room_for_a_stash() -> None:
    # Beside another activation there is no room for what I leaves, so the best is to do B.
    prices = Costs(activation_bytes=1, weight_stash_bytes=(3, 1))
    problem = SchedulingProblem.of(prices, Placement.loop(2), 2, memory=3)
    exact = prove(problem)
    verify(problem, exact)
    assert exact.is_optimal
    assert exact.seconds == pytest.approx(least_seconds(problem, with_merged=True))


INTERRUPTED = """
import os, signal
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.exact.prove import prove
from penstock.planner.problem import SchedulingProblem

prices = Costs(activation_bytes=1, weight_stash_bytes=(3, 1))
prove(SchedulingProblem.of(prices, Placement.loop(2), 2, memory=3))
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_raises_after_a_proof_as_it_does_before() -> None:
    # The solver replaces the handler of Ctrl-C and leaves the system's, which ends the process.
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_seconds_between_whole_ticks_are_rounded_safely() -> None:
    prices = Costs(
        forward=(1 / 3, 0.7), backward_input=(0.1, 2 / 7), backward_weight=0.3, transfer=0.05
    )
    problem = SchedulingProblem.of(prices, Placement.loop(2), 2)
    exact = prove(problem)
    verify(problem, exact)
    assert exact.is_optimal
    assert exact.seconds == pytest.approx(least_seconds(problem))


def test_a_schedule_at_the_bound_comes_back_unchanged() -> None:
    start = build("ZBV", ranks=4, microbatches=12)
    problem = SchedulingProblem.of(Costs(), start.placement, 12, boundary="papers")
    exact = prove(problem, start=start)
    assert exact.schedule is start
    assert exact == Exact(start, 36, lower_bound(problem))
    assert exact.is_optimal


def test_the_answer_is_never_worse_than_the_start() -> None:
    start = build("1F1B", ranks=4, microbatches=8)
    problem = SchedulingProblem.of(
        Costs(activation_bytes=1, weight_stash_bytes=1), start.placement, 8, 4
    )
    exact = prove(problem, start=start, seconds=0.01)
    verify(problem, exact)
    assert exact.seconds <= simulate(start).end_time


def test_the_same_problem_gets_the_same_answer() -> None:
    problem = draw_problem(Random(3), Placement.loop(3), 4, capacity=2)
    first, second = prove(problem), prove(problem)
    assert first == second
    assert first.is_optimal


def test_every_better_schedule_is_reported_to_progress() -> None:
    problem = draw_problem(Random(3), Placement.loop(3), 4, capacity=2)
    told: list[tuple[float, float]] = []
    exact = prove(problem, progress=lambda step, bound: told.append((step, bound)))
    assert [step for step, _ in told] == sorted((step for step, _ in told), reverse=True)
    assert told[-1][0] == pytest.approx(exact.seconds)
    assert all(bound <= step for step, bound in told)


def test_without_the_solver_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    problem = draw_problem(Random(3), Placement.loop(3), 4, capacity=2)
    with pytest.raises(MissingDependencyError, match=r"pip install 'penstock\[solver\]'"):
        prove(problem)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1, 1.5, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_four_ranks_and_eight_microbatches_are_proven(seed: int, capacity: float | None) -> None:
    problem = draw_problem(Random(seed), Placement.loop(4), 8, capacity=capacity)
    exact = prove(problem, seconds=120)
    verify(problem, exact)
    assert exact.is_optimal
