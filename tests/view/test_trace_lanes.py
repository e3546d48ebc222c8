"""Rows in one lane of a trace never overlap, and the number of lanes is minimal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import lower
from penstock.costs import Costs
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.trace_lanes import Lane, find_lanes
from tests.strategies import schedules

EIGHTH = st.integers(0, 40).map(lambda number: number / 8)


def count_at_once(all_times: tuple[Floats, Floats], one: tuple[float, float]) -> int:
    """Count the rows that run when one begins; a row of length 0 fits between two others."""
    (start, end), (begin, length) = all_times, one
    if not length:
        return 1 + int(((start < begin) & (begin < end)).sum())
    return int(((start <= begin) & (begin < end)).sum())


@given(st.lists(st.tuples(EIGHTH, EIGHTH), min_size=1, max_size=20))
def test_rows_in_a_lane_do_not_overlap_and_no_lane_is_superfluous(
    times: list[tuple[float, float]],
) -> None:
    schedule = Schedule.from_orders([[f"0F{number}" for number in range(len(times))]])
    start = np.array([begin for begin, _ in times])
    end = start + np.array([length for _, length in times])
    lanes = find_lanes(Timeline(schedule, start, end, np.zeros(len(times))))
    assert len(lanes.lanes) == max(map(count_at_once, [(start, end)] * len(times), times))
    for lane in lanes.lanes:
        rows = lanes.rows_by_time[lanes.of_row[lanes.rows_by_time] == lane.number]
        assert len(rows)
        assert (end[rows][:-1] <= start[rows][1:]).all()


@given(schedules(max_ranks=4, max_microbatches=6))
def test_compute_without_overlap_needs_one_lane_per_rank(schedule: Schedule) -> None:
    timeline = simulate(lower(schedule), Costs(transfer=0.25))
    found = [lane for lane in find_lanes(timeline).lanes if lane.name.startswith("compute")]
    if not schedule.rows.joined.any():
        assert [(lane.rank, lane.name) for lane in found] == [
            (rank, "compute") for rank in range(schedule.num_ranks)
        ]


def test_receives_that_wait_at_the_same_time_have_separate_lanes() -> None:
    orders = [["0F0", "0F1", "0SEND_F0", "0SEND_F1"], ["1RECV_F0", "1RECV_F1", "1F0", "1F1"]]
    timeline = simulate(Schedule.from_orders(orders))
    assert find_lanes(timeline).lanes == (
        Lane(0, 1, "compute"),
        Lane(0, 2, "communication"),
        Lane(1, 3, "compute"),
        Lane(1, 4, "communication"),
        Lane(1, 5, "communication 2"),
    )
