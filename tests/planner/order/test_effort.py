"""The same effort gives the same order, whatever the clock says, and no clock ends it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from random import Random
from subprocess import Popen

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import SizeError
from penstock.ir.placement import Placement
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.solver import solve
from penstock.planner.planning import plan
from penstock.planner.problem import SchedulingProblem
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
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
        capacity=random.uniform(1, 1.5 * ranks),
        full_backward=random.random() < 0.3,
        boundary=random.choice(BOUNDARIES),
    )
    return problem, random.choice((1.01, 1.1, 1.3, 2.0))


@pytest.mark.parametrize("seed", range(4))
def test_families_that_keep_a_tighter_limit_are_never_faster_at_a_looser_one(seed: int) -> None:
    problem, more = draw(seed)
    looser = replace(problem, memory=tuple(more * limit for limit in problem.memory))
    found = solve(looser, effort=5_000)
    for schedule in fixed_schedules(problem):
        timeline = simulate(schedule, problem.costs)
        pairs = zip(timeline.rank_peak_bytes, problem.memory, strict=True)
        if all(peak <= limit for peak, limit in pairs):
            assert found.seconds <= timeline.period(problem.boundary) * ROUNDING


@pytest.mark.parametrize("seed", [1, 3])
def test_the_same_effort_gives_the_same_schedule(seed: int) -> None:
    problem, _ = draw(seed)
    one, other = (solve(problem, effort=5_000) for _ in range(2))
    assert one.schedule == other.schedule
    assert not one.is_cut_short


def test_no_clock_ends_an_effort() -> None:
    problem, _ = draw(2)
    patient, hasty = (solve(problem, effort=5_000, seconds=seconds) for seconds in (60, 0))
    assert patient.schedule == hasty.schedule
    assert not hasty.is_cut_short


def test_a_named_placement_is_never_better_than_the_choice() -> None:
    costs = Costs(1.0, 1.2, 0.7, transfer=0.1, activation_bytes=3, weight_stash_bytes=1)
    free = plan(costs, ranks=4, microbatches=10, memory=9, effort=10_000)
    for placement in ("loop", "interleaved", "v"):
        named = plan(costs, ranks=4, microbatches=10, memory=9, placement=placement, effort=10_000)
        assert free.seconds <= named.seconds * ROUNDING


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that never wait, while the work inside lasts, and at most a few minutes."""
    busy = "from time import monotonic as t\nend = t() + 300\nwhile t() < end: pass"
    processes = [Popen([sys.executable, "-c", busy]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_busy_processes_beside_it_do_not_change_a_plan() -> None:
    problem, _ = draw(1)
    quiet = solve(problem, seconds=1)
    with busy_processes(6):
        busy = solve(problem, seconds=1)
    assert busy.schedule == quiet.schedule
    assert not busy.is_cut_short


@pytest.mark.slow
def test_no_family_is_faster_than_a_plan_beside_busy_processes() -> None:
    random = Random(0)
    with busy_processes(6):
        for _ in range(20):
            ranks, microbatches = random.randint(2, 8), random.randint(4, 20)
            # Unit costs, or some like measured ones: uneven, with a head and host seconds.
            seconds = [random.uniform(0.9, 1.1) for _ in range(ranks - 1)] + [1.6]
            uneven = Costs(seconds, seconds, seconds, transfer=0.05, host_action=0.01)
            costs = random.choice((Costs(), uneven))
            costs = replace(costs, activation_bytes=1, weight_stash_bytes=0.5)
            memory = random.choice((None, ranks, 1.5 * ranks))
            found = plan(costs, ranks=ranks, microbatches=microbatches, memory=memory, seconds=0.3)
            for family in families_that_keep(memory, costs, ranks, microbatches):
                assert found.seconds <= family * ROUNDING


def families_that_keep(
    memory: float | None, costs: Costs, ranks: int, microbatches: int
) -> Iterator[float]:
    """Yield the step of every family of one copy that exists and keeps a limit."""
    has_lists = isinstance(costs.forward, tuple)
    for name, per_rank in product(FAMILIES, (1, 2)):
        if FAMILIES[name].copies > 1 or (has_lists and per_rank > 1):
            continue
        try:
            schedule = build(
                name, ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank
            )
        except SizeError:
            continue
        timeline = simulate(schedule, costs)
        if not schedule.is_forward_only and (memory is None or timeline.peak_bytes <= memory):
            yield timeline.end_time
