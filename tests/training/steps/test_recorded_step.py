"""From recordings to a timeline."""

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ranks.control import GroupControl, LocalControl
from penstock.step.step_data import StepRecording
from penstock.training.steps.recorded_step import join_recordings
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


def join_late(rank: int) -> list[list[list[float]]]:
    group = dist.group.WORLD
    assert group is not None
    control = GroupControl(group)
    found = []
    for machine in ("one", f"number {rank}", ""):
        mine = StepRecording(
            row=[2 * rank, 2 * rank + 1],
            start=[4.0, 8.0],
            end=[5.0, 9.0],
            memory=[0.0, 0.0],
            began=100.0 + 3 * rank,
            machine=machine,
        )
        found.append(columns_of(join_recordings(control, SCHEDULE, mine)))
    return found


# Each rank's seconds counted from when it had split its batch, so that what took one rank longer
# to prepare looked like messages that came late, or before they were sent.
def test_ranks_of_one_machine_have_one_clock(two_processes: Processes) -> None:
    apart = [[0.0, 4.0, 0.0, 4.0], [1.0, 5.0, 1.0, 5.0], [0.0] * 4]
    together = [[0.0, 4.0, 3.0, 7.0], [1.0, 5.0, 4.0, 8.0], [0.0] * 4]
    assert two_processes.run(join_late) == [[together, apart, apart]] * 2


# Edge 0 joins stage 0 of rank 0 with stage 1 of rank 1.
LOWERED = ps.lower(SCHEDULE)


def receive_of(timeline: ps.Timeline) -> tuple[float, float]:
    """Return when rank 1 begins to receive, and when the message is there."""
    spans = {str(span.action): span for span in timeline.spans(1)}
    return spans["1RECV_F0"].start, spans["1RECV_F0"].end


def record(
    waits: list[tuple[bool, int, int, float, float]],
    arrivals: list[tuple[bool, int, int, float]],
) -> ps.Timeline:
    """Return the timeline of a step of which row n begins at n, and takes no time."""
    rows = list(range(len(LOWERED.rows)))
    times = [float(row) for row in rows]
    mine = StepRecording(rows, times, list(times), [0.0] * len(rows), waits, arrivals)
    return join_recordings(LocalControl(), LOWERED, mine)


def test_a_receive_ends_when_the_rank_no_longer_waits() -> None:
    (begin,) = [s.start for s in record([], []).spans(1) if str(s.action) == "1RECV_F0"]
    wait = (True, 0, 0, begin + 3, begin + 20)
    assert receive_of(record([wait], [])) == (begin, begin + 20)
    # The sender has seen it leave while the rank waited: the end of the wait is when it came.
    assert receive_of(record([wait], [(True, 0, 0, begin + 18)])) == (begin, begin + 20)


def test_a_receive_that_nobody_waited_for_ends_when_the_sender_says() -> None:
    (begin,) = [s.start for s in record([], []).spans(1) if str(s.action) == "1RECV_F0"]
    wait = (True, 0, 0, begin + 3, begin + 4)
    assert receive_of(record([wait], [(True, 0, 0, begin + 2)])) == (begin, begin + 2)
    # It was there before the receive began.
    assert receive_of(record([wait], [(True, 0, 0, begin - 2)])) == (begin, begin)


def test_gradients_are_messages_of_their_own() -> None:
    wait = (False, 0, 0, 100.0, 200.0)
    ends = {str(s.action): s.end for s in record([wait], []).spans(0)}
    assert ends["0RECV_B0"] == 200.0


# ---- real steps


def record_steps(group: dist.ProcessGroup | None) -> list[ps.Timeline]:
    """Return the timelines of two recorded steps; shapes are learned in the first."""
    torch.manual_seed(0)
    pipeline = ps.Pipeline(
        [nn.Linear(4, 4) for _ in range(4)],
        "ZBV",
        microbatches=3,
        ranks=None if group is not None else 2,
        loss=nn.MSELoss(),
        group=group,
    )
    x, y = torch.ones(6, 4), torch.zeros(6, 4)
    found = [pipeline.step(x, target=y, record=flag).timeline for flag in (True, False, True)]
    return [timeline for timeline in found if timeline is not None]


def assert_received_in_time(timeline: ps.Timeline) -> None:
    """Assert that every receive ends before the work that uses its message begins."""
    assert bool((timeline.start <= timeline.end).all())
    for rank in range(2):
        spans = {str(span.action): span for span in timeline.spans(rank)}
        receives = [span for name, span in spans.items() if "RECV" in name]
        assert len(receives) == 6
        for span in receives:
            kind = "F" if span.action.kind is ps.Kind.RECV_F else "I"
            full = f"{span.action.stage}B{span.action.microbatch}"
            user = spans.get(f"{span.action.stage}{kind}{span.action.microbatch}", spans.get(full))
            assert user is not None
            assert span.end <= user.start


def test_receives_of_a_recorded_step_end_before_their_use() -> None:
    timelines = record_steps(None)
    assert len(timelines) == 2
    for timeline in timelines:
        assert_received_in_time(timeline)


def record_on_rank(_rank: int) -> list[ps.Timeline]:
    return record_steps(dist.group.WORLD)


def test_processes_record_when_messages_are_there(two_processes: Processes) -> None:
    first, second = two_processes.run(record_on_rank)
    assert [t.end.tolist() for t in first] == [t.end.tolist() for t in second]
    for timeline in first:
        assert_received_in_time(timeline)
        # No message arrives before it was sent.
        ends = {str(span.action): span.end for rank in range(2) for span in timeline.spans(rank)}
        for name, end in ends.items():
            if "RECV_F" in name:
                stage, microbatch = map(int, name.split("RECV_F"))
                assert ends[f"{stage - 1}F{microbatch}"] <= end
        # Rank 1 can do nothing until the first forward of rank 0 has come.
        receive = next(s for s in timeline.spans(1) if s.action.kind is ps.Kind.RECV_F)
        assert receive.end > receive.start
