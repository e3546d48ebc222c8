"""From recordings to a timeline."""

import torch.distributed as dist

import penstock as ps
from penstock.ranks.control import GroupControl, LocalControl
from penstock.step.step_data import StepRecording
from penstock.training.recorded_step import join_recordings
from tests.processes import Processes
from tests.tables import read_schedule

SCHEDULE = read_schedule("0F0 0B0\n1F0 1B0")


def columns_of(timeline: ps.Timeline) -> list[list[float]]:
    return [column.tolist() for column in (timeline.start, timeline.end, timeline.memory)]


def test_times_count_from_the_first_start_and_rows_have_the_order_of_the_schedule() -> None:
    recording = StepRecording(
        row=[0, 2, 3, 1],
        start=[5.0, 6.0, 7.0, 8.0],
        end=[5.5, 6.5, 7.5, 8.5],
        memory=[1.0, 2.0, 3.0, 4.0],
    )
    timeline = join_recordings(LocalControl(), SCHEDULE, recording)
    assert timeline.schedule is SCHEDULE
    assert columns_of(timeline) == [
        [0.0, 3.0, 1.0, 2.0],
        [0.5, 3.5, 1.5, 2.5],
        [1.0, 4.0, 2.0, 3.0],
    ]


def join_two(rank: int) -> list[list[float]]:
    group = dist.group.WORLD
    assert group is not None
    control = GroupControl(group)
    rows = [2 * rank, 2 * rank + 1]
    start = [4.0 + rank, 8.0 - rank]
    mine = StepRecording(rows, start, [time + 0.5 for time in start], [float(rank)] * 2)
    return columns_of(join_recordings(control, SCHEDULE, mine))


def test_every_rank_joins_the_same_timeline(two_processes: Processes) -> None:
    expected = [[0.0, 4.0, 1.0, 3.0], [0.5, 4.5, 1.5, 3.5], [0.0, 0.0, 1.0, 1.0]]
    assert two_processes.run(join_two) == [expected, expected]
