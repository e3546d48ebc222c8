"""No schedule beats the bound, and where the best is known, the bound is close to it."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary
from tests.facts import V_ORDER, ZERO_BUBBLE
from tests.planner.every_order import least_seconds
from tests.planner.problems import draw_problem, published_problem
from tests.strategies import costs, every_family, schedules
from tests.tables import read_schedule

TINY = (
    (Placement.loop(1), 3),
    (Placement.loop(2), 1),
    (Placement.loop(2), 2),
    (Placement.loop(2, 2), 1),
    (Placement.v(2), 1),
    (Placement((0, 1, 0)), 1),
)
CAPACITIES = (None, 1, 1.25, 1.5, 2, 3)


BOUNDARIES: tuple[Boundary, ...] = ("everything", "nothing", "papers")


def with_own_limit(
    schedule: Schedule, prices: Costs, boundary: Boundary
) -> tuple[SchedulingProblem, float]:
    """Return a problem whose limit a schedule just meets, and the step of the schedule."""
    timeline = simulate(schedule, prices)
    problem = SchedulingProblem.of(
        prices,
        schedule.placement,
        schedule.microbatches,
        timeline.rank_peak_bytes,
        boundary=boundary,
    )
    return problem, timeline.period(boundary)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(("placement", "microbatches"), TINY, ids=str)
def test_no_order_of_a_tiny_problem_beats_the_bound(
    placement: Placement, microbatches: int, capacity: float | None, boundary: Boundary
) -> None:
    for seed in range(4):
        problem = draw_problem(
            Random(seed), placement, microbatches, capacity=capacity, boundary=boundary
        )
        assert lower_bound(problem) <= least_seconds(problem)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize(
    ("placement", "microbatches"), [(Placement.loop(2), 3), (Placement.loop(3), 2)], ids=str
)
def test_no_order_of_a_small_problem_beats_the_bound(
    placement: Placement, microbatches: int, capacity: float | None, boundary: Boundary
) -> None:
    problem = draw_problem(
        Random(1), placement, microbatches, capacity=capacity, boundary=boundary
    )
    assert lower_bound(problem) <= least_seconds(problem, in_order=True)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1, 1.25, 1.5])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("placement", [Placement.v(2), Placement.loop(2, 2)], ids=str)
def test_no_order_in_two_rounds_beats_the_bound(
    placement: Placement, capacity: float, boundary: Boundary
) -> None:
    problem = draw_problem(Random(0), placement, 2, capacity=capacity, boundary=boundary)
    assert lower_bound(problem) <= least_seconds(problem, in_order=True)


@pytest.mark.parametrize("capacity", [None, 1, 1.5])
def test_the_bound_knows_that_a_whole_backward_may_be_faster(capacity: float | None) -> None:
    for seed in range(6):
        problem = draw_problem(
            Random(seed), Placement.loop(2), 2, capacity=capacity, full_backward=True
        )
        best = least_seconds(problem, with_merged=True)
        assert lower_bound(problem) <= best


def test_the_bound_knows_that_a_whole_backward_may_need_fewer_bytes() -> None:
    prices = Costs(activation_bytes=1, weight_stash_bytes=(3, 1))
    problem = SchedulingProblem.of(prices, Placement.loop(2), 2, memory=4)
    assert lower_bound(problem) <= least_seconds(problem, with_merged=True)


@given(st.data())
def test_no_family_beats_the_bound_under_the_limit_that_it_keeps(data: st.DataObject) -> None:
    schedule = data.draw(schedules().filter(is_training_a_chain))
    size = st.integers(1, 16).map(lambda eighths: eighths / 8)
    sizes = st.lists(size, min_size=schedule.num_stages, max_size=schedule.num_stages)
    activation = data.draw(sizes)
    prices = replace(
        data.draw(costs(schedule)),
        activation_bytes=activation,
        weight_stash_bytes=[data.draw(st.sampled_from((0, 0.5, 1))) * a for a in activation],
    )
    for boundary in BOUNDARIES:
        problem, step = with_own_limit(schedule, prices, boundary)
        assert lower_bound(problem) <= step


def is_training_a_chain(schedule: Schedule) -> bool:
    return schedule.dataflow.is_chain and not schedule.is_forward_only


@pytest.mark.parametrize(
    "ranks", [1, 2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16))]
)
def test_no_family_of_even_stages_beats_the_bound(ranks: int) -> None:
    prices = Costs(1, 1.2, 0.7, transfer=0.1, activation_bytes=3, weight_stash_bytes=1)
    for microbatches in (1, ranks, 3 * ranks):
        for schedule in filter(is_training_a_chain, every_family(ranks, microbatches)):
            for boundary in BOUNDARIES:
                problem, step = with_own_limit(schedule, prices, boundary)
                assert lower_bound(problem) <= step, (schedule.name, boundary)


def bubble_rate(problem: SchedulingProblem, span: float) -> float:
    return 1 - float(problem.work.max()) / span


def test_with_room_for_p_activations_the_published_schedules_are_the_best_there_are() -> None:
    rates = [
        round(bubble_rate(problem, lower_bound(problem)), 4)
        for row in ZERO_BUBBLE
        for problem in [published_problem(row, Placement.loop(row.ranks), activations=row.ranks)]
    ]
    assert rates == [row.zb_1p for row in ZERO_BUBBLE]


def test_with_room_for_2p_activations_the_published_schedules_leave_little_to_gain() -> None:
    for row in ZERO_BUBBLE:
        problem = published_problem(row, Placement.loop(row.ranks), activations=2 * row.ranks)
        left = row.zb_2p - round(bubble_rate(problem, lower_bound(problem)), 4)
        assert 0 <= left < 0.007


def test_in_a_v_the_published_schedules_leave_little_to_gain() -> None:
    for row in V_ORDER:
        problem = published_problem(row, Placement.v(row.ranks), activations=2 * row.ranks)
        left = min(row.zb_v, row.v_order) - round(bubble_rate(problem, lower_bound(problem)), 4)
        assert 0 <= left < 0.004


@pytest.mark.parametrize(
    ("family", "ranks", "microbatches"),
    [
        ("V-Half", 4, 12),
        ("V-Half", 8, 24),
        ("V-Half", 16, 48),
        ("V-Min", 4, 12),
        ("V-Min", 16, 48),
    ],
)
def test_families_of_little_memory_are_optimal_at_unit_costs(
    family: str, ranks: int, microbatches: int
) -> None:
    schedule = build(family, ranks=ranks, microbatches=microbatches)
    prices = Costs(activation_bytes=1, weight_stash_bytes=1)
    problem, span = with_own_limit(schedule, prices, "papers")
    assert lower_bound(problem) == pytest.approx(span)


def test_a_slow_first_rank_keeps_the_others_waiting() -> None:
    # Rank 1 has the most work, but gets its second input only after 3 seconds.
    prices = Costs(forward=(3, 1), backward_input=(1, 3), backward_weight=(0, 3))
    for boundary in BOUNDARIES:
        problem = SchedulingProblem.of(prices, Placement.loop(2), 2, boundary=boundary)
        assert lower_bound(problem) == pytest.approx(least_seconds(problem)), boundary


def test_a_placement_that_does_not_go_round_has_a_bound_too() -> None:
    costs, placement = Costs(transfer=0.5).for_each_stage(5), Placement((0, 1, 0, 0, 1))
    problem = SchedulingProblem.of(costs, placement, 4, boundary="papers")
    assert lower_bound(problem) == pytest.approx(4 * 3 * 3)
    # Rank 0 begins at once and has the most work.
    assert lower_bound(replace(problem, boundary="everything")) == pytest.approx(4 * 3 * 3)


def test_sizes_of_nothing_have_a_bound() -> None:
    problem = SchedulingProblem.of(Costs(0, 0, 0), Placement.loop(3), 2, memory=0)
    assert lower_bound(problem) == 0


def test_less_memory_never_gives_a_lower_bound() -> None:
    for seed in range(20):
        problems = [
            draw_problem(Random(seed), Placement.loop(4), 8, capacity=capacity)
            for capacity in (None, 6, 4, 3, 2, 1.5, 1)
        ]
        found = [lower_bound(problem) for problem in problems]
        assert (np.diff(found) >= 0).all()


@pytest.mark.parametrize("gain", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 9)])
def test_overlapped_pairs_do_not_beat_the_bound(
    ranks: int, microbatches: int, gain: float
) -> None:
    # With a gain, DualPipeV once was faster than a bound that took its pairs one by one.
    schedule = build("DualPipeV", ranks=ranks, microbatches=microbatches)
    prices = Costs(forward=1.0, backward_input=0.8, backward_weight=0.5, overlap_gain=gain)
    problem = SchedulingProblem.of(prices, schedule.placement, microbatches)
    assert lower_bound(problem) <= simulate(schedule, prices).end_time
    assert solve(problem, seconds=0.2).gap >= 0


# Only F got the gain of pairs, so that a step of pairs without an F was below the bound.
def test_pairs_without_a_forward_do_not_beat_the_bound() -> None:
    schedule = read_schedule("""
        0F0 0F1 0I0 (0I1;0W0)OVERLAP_F_B 0W1
    """)
    for gain in (1.0, {"I+W": 1.0}, {"W+I": 0.5, "F+B": 0.25}):
        costs = Costs(overlap_gain=gain)
        problem = SchedulingProblem.of(costs, schedule.placement, 2)
        assert lower_bound(problem) <= simulate(schedule, costs).end_time < 6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_until_the_last_rank_ends_known_orders_are_the_best_at_unit_costs(ranks: int) -> None:
    # In a loop the last rank begins after p - 1 forwards; in a V they are half as long.
    microbatches = 2 * ranks
    loop = SchedulingProblem.of(Costs(), Placement.loop(ranks), microbatches)
    assert lower_bound(loop) == pytest.approx(3 * microbatches + ranks - 1)
    assert simulate(build("ZB-H2", ranks=ranks, microbatches=microbatches)).end_time == (
        3 * microbatches + ranks - 1
    )
    vee = SchedulingProblem.of(Costs(), Placement.v(ranks), microbatches)
    assert lower_bound(vee) == pytest.approx(3 * microbatches + (ranks - 1) / 2)
