"""What a repeated step costs, beside steps that are simulated in a row."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.actions import Action, Overlap
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary, Period
from penstock.sim.timeline import Timeline
from tests import strategies
from tests.tables import read_schedule

# Enough for every transient of the sizes below to be over, and a multiple of small cycles.
WARM_UP, STEPS = 60, 60


def repeat_orders(schedule: Schedule, steps: int) -> Schedule:
    """Return one long schedule: the same order again and again, with new microbatches."""
    per_step = schedule.microbatches

    def shifted(work: Action | Overlap, step: int) -> Action | Overlap:
        if isinstance(work, Overlap):
            return Overlap(tuple(shifted_action(action, step) for action in work.actions))
        return shifted_action(work, step)

    def shifted_action(action: Action, step: int) -> Action:
        assert action.microbatch is not None
        return Action(action.kind, action.stage, action.microbatch + step * per_step)

    orders = [
        [shifted(work, step) for step in range(steps) for work in order]
        for order in schedule.orders
    ]
    return Schedule.from_orders(orders, dataflow=schedule.dataflow)


def ends_of_steps(schedule: Schedule, costs: Costs, steps: int) -> list[float]:
    """Return when the last rank ends each of several steps in a row."""
    long = simulate(repeat_orders(schedule, steps), costs)
    step = long.schedule.rows.microbatch // schedule.microbatches
    return [float(long.end[step == number].max()) for number in range(steps)]


def mean_distance(schedule: Schedule, costs: Costs) -> float:
    """Return the mean distance of the ends of steps in a row, after a warm-up."""
    ends = ends_of_steps(schedule, costs, WARM_UP + STEPS + 1)
    return (ends[WARM_UP + STEPS] - ends[WARM_UP]) / STEPS


def random_costs(schedule: Schedule, seed: int) -> Costs:
    """Return costs per stage and link, in eighths of a second so that sums are exact."""
    random = np.random.default_rng(seed)
    ranks, stages = schedule.num_ranks, schedule.num_stages

    def draw(*shape: int) -> list[float]:
        numbers: list[float] = (random.integers(1, 25, shape) / 8).tolist()
        return numbers

    return Costs(draw(stages), draw(stages), draw(stages), transfer=draw(ranks, ranks))  # type: ignore[arg-type]  # a nested list


def check_mean_of_steps(ranks: int, microbatches: int) -> None:
    for seed, schedule in enumerate(strategies.every_family(ranks, microbatches)):
        costs = random_costs(schedule, 1000 * ranks + 10 * microbatches + seed)
        period = simulate(schedule, costs).period("nothing")
        assert period == pytest.approx(mean_distance(schedule, costs), rel=1e-9), schedule.name


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (3, 4), (4, 7)])
def test_period_is_the_mean_distance_of_steps_in_a_row(ranks: int, microbatches: int) -> None:
    check_mean_of_steps(ranks, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", range(1, 17))
@pytest.mark.parametrize("ranks", range(1, 9))
def test_period_is_the_mean_distance_in_every_family_and_size(
    ranks: int, microbatches: int
) -> None:
    check_mean_of_steps(ranks, microbatches)


@given(st.data())
@settings(deadline=None)
def test_no_boundary_costs_more_than_one_that_waits_for_more(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules(max_ranks=5, max_microbatches=8))
    timeline = simulate(schedule, data.draw(strategies.costs(schedule)))
    boundaries: tuple[Boundary, ...] = ("nothing", "papers", "gradients", "everything")
    periods = [timeline.period(boundary) for boundary in boundaries]
    assert max(timeline.busy_seconds) <= periods[0]
    assert periods == sorted(periods)
    assert periods[2:] == [timeline.end_time] * 2


def test_zero_bubble_orders_repeat_without_idle_time_if_nothing_waits() -> None:
    timeline = simulate(build("ZB-H2", ranks=8, microbatches=16))
    assert (timeline.end_time, timeline.longest_span) == (55, 48)
    assert timeline.repeat("nothing") == Period("nothing", 48.0, (48.0,) * 8)
    assert timeline.repeat("nothing").bubble_rate == 0
    assert timeline.bubble_rate == 7 / 55


def test_period_can_be_below_the_longest_span() -> None:
    # Rank 0 begins early and then waits; in the long run it begins later, and waits less.
    schedule = build("DualPipe", ranks=2, microbatches=2)
    costs = Costs([1, 3, 4, 2], [2, 4, 3, 3], [4, 1, 2, 2])
    timeline = simulate(schedule, costs)
    assert timeline.rank_spans == (18, 17)
    assert timeline.period("nothing") == mean_distance(schedule, costs) == 17


def test_rank_that_depends_on_nobody_does_not_make_the_period_longer() -> None:
    schedule = build("ForwardOnly", ranks=3, microbatches=4)
    assert simulate(schedule, Costs(forward=[1, 3, 2])).period("nothing") == 12
    assert simulate(schedule, Costs(forward=[5, 3, 2])).period("nothing") == 20


def test_cycle_over_two_steps_counts_half() -> None:
    # Rank 1 does its late work first and its early work last, so that each step waits for the one
    # before it on the other rank.
    schedule = read_schedule("""
        0F0 0F1 0I0 0I1 0W0 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """)
    for seed in range(40):
        costs = random_costs(schedule, seed)
        period = simulate(schedule, costs).period("nothing")
        assert period == pytest.approx(mean_distance(schedule, costs), rel=1e-9)


def optimizer_period(boundary: Boundary, seconds: float | Sequence[float]) -> float:
    return simulate(build("1F1B", ranks=2, microbatches=2)).period(
        boundary, optimizer_seconds=seconds
    )


def test_optimizer_is_waited_for_only_if_everything_is() -> None:
    assert optimizer_period("everything", [0, 2]) == 11
    # Rank 1 runs its optimizer while rank 0 runs the first forward.
    assert optimizer_period("gradients", [0, 2]) == 10
    assert optimizer_period("gradients", [2, 0]) == 11
    assert optimizer_period("nothing", 2) == 11
    assert optimizer_period("papers", 2) == 9


def without_prices(timeline: Timeline) -> Timeline:
    """Return a timeline as if it had been recorded."""
    return Timeline(timeline.schedule, timeline.start, timeline.end, timeline.memory)


@pytest.mark.parametrize("is_lowered", [False, True])
def test_period_of_a_recorded_step_comes_from_its_times(is_lowered: bool) -> None:
    schedule = build("ZBV", ranks=4, microbatches=8)
    schedule = lower(schedule, receives=Costs(transfer=0.25)) if is_lowered else schedule
    timeline = simulate(schedule, Costs(forward=[1, 2, 1, 1, 1, 1, 2, 1], transfer=0.25))
    assert without_prices(timeline).period("nothing") == timeline.period("nothing")


def test_unknown_boundary_is_refused_with_those_that_exist() -> None:
    timeline = simulate(build("1F1B", ranks=2, microbatches=2))
    with pytest.raises(ArgumentError) as caught:
        timeline.period("barrier")  # type: ignore[arg-type]  # that is what is refused
    assert str(caught.value) == (
        "boundary must be one of 'everything', 'gradients', 'nothing', 'papers' (got 'barrier')"
    )
