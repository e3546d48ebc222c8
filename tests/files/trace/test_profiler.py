"""Traces in the form of torch's profiler: which step, which rank, which clock."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ArgumentError, ParseError
from penstock.files.trace.reading import read_trace
from penstock.sim.timeline import Timeline

Event = dict[str, Any]


def host(name: str, start: float, length: float, pid: int = 70) -> Event:
    """Return a range as the profiler records it on the host."""
    place = {"cat": "user_annotation", "name": name, "pid": pid, "tid": pid}
    return {"ph": "X", **place, "ts": start, "dur": length}


def device(launched: float, start: float, length: float, link: int) -> list[Event]:
    """Return a launch, perhaps from another thread than the range, and its kernel."""
    arguments = {"correlation": link}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 70, "tid": 99}
    kernel = {"cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}
    return [
        {"ph": "X", **kernel, "ts": start, "dur": length, "args": arguments},
        {"ph": "X", **call, "ts": launched, "dur": 0.5, "args": arguments},
    ]


def in_turn(*names: str, begin: float = 0.0, pid: int = 70) -> list[Event]:
    """Ranges of ten microseconds, one after the other."""
    return [host(name, begin + 10 * place, 10, pid) for place, name in enumerate(names)]


def write(file: Path, events: list[Event], **fields: Any) -> Path:
    noise = [
        {"ph": "M", "name": "process_name", "pid": 70, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "0F0", "pid": 70, "tid": 70, "ts": 1, "dur": 1},
        {"ph": "X", "cat": "user_annotation", "name": "my range", "pid": 70, "ts": 1, "dur": 1},
        {"ph": "i", "name": "[memory]", "pid": 70, "ts": 2, "args": {"Bytes": 12}},
    ]
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*noise, *events], **fields}))
    return file


def table(timeline: Timeline) -> list[list[tuple[str, float, float]]]:
    """Return every rank's actions with start and end, in microseconds."""
    return [
        [(str(s.action), round(s.start * 1e6, 3), round(s.end * 1e6, 3)) for s in ranks]
        for ranks in map(timeline.spans, range(timeline.schedule.num_ranks))
    ]


def test_ranges_with_the_name_of_an_action_are_the_timeline(tmp_path: Path) -> None:
    file = write(tmp_path / "step.json", [host("0B0", 30.5, 4), host("0F0", 20, 10)])
    timeline = read_trace(file)
    assert table(timeline) == [[("0F0", 0, 10), ("0B0", 10.5, 14.5)]]
    assert timeline.schedule.name == "step"


def test_every_file_is_a_rank_on_one_clock(tmp_path: Path) -> None:
    # The second process counts from a moment that is five microseconds later.
    first = write(tmp_path / "a.json", in_turn("0F0", "0B0"), baseTimeNanoseconds=10**18)
    second = write(tmp_path / "b.json", in_turn("1F0", "1B0"), baseTimeNanoseconds=10**18 + 5000)
    for files in ((first, second), (second, first)):
        assert table(read_trace(*files)) == [
            [("0F0", 0, 10), ("0B0", 10, 20)],
            [("1F0", 5, 15), ("1B0", 15, 25)],
        ]


def test_processes_are_numbered_as_they_say(tmp_path: Path) -> None:
    # Each is a rank of a larger world, in which stages go down as ranks go up.
    first = write(tmp_path / "a.json", in_turn("0F0", "0B0"), distributedInfo={"rank": 6})
    second = write(tmp_path / "b.json", in_turn("1F0", "1B0"), distributedInfo={"rank": 2})
    timeline = read_trace(first, second)
    assert timeline.schedule.placement.rank_of_stage == (1, 0)


def test_processes_of_a_merged_file_are_ranks(tmp_path: Path) -> None:
    events = [*in_turn("1F0", "1B0", pid=71), *in_turn("0F0", "0B0", pid=72)]
    timeline = read_trace(write(tmp_path / "merged.json", events))
    assert timeline.schedule.placement.rank_of_stage == (0, 1)


STEP = ("0UNSHARD", "0F0", "0F1", "0B0", "0RESHARD", "0UNSHARD", "0B1", "0REDUCE_GRAD")
EVALUATION = ("0UNSHARD", "0F0", "0F1", "0RESHARD")


@pytest.mark.parametrize(
    ("step", "expected"), [(0, STEP), (1, EVALUATION), (2, STEP), (-1, STEP), (-2, EVALUATION)]
)
def test_one_of_several_steps_is_taken(
    step: int, expected: tuple[str, ...], tmp_path: Path
) -> None:
    file = write(tmp_path / "steps.json", in_turn(*STEP, *EVALUATION, *STEP))
    timeline = read_trace(file, step=step)
    assert [name for name, _, _ in table(timeline)[0]] == list(expected)
    assert timeline.start[0] == 0.0


def test_times_are_the_devices_where_there_is_one(tmp_path: Path) -> None:
    events = [
        host("0RECV_F0", 0, 1),
        host("0F0", 1, 1),
        host("0F1", 2, 1),
        host("0SEND_F1", 3, 1),
        host("0B0", 60, 1),
        host("0SEND_B0", 62, 1),
        *device(1.2, 5, 9, link=1),
        *device(1.6, 15, 10, link=2),
        # One range may have kernels in several streams.
        *device(2.1, 26, 10, link=3),
        *device(2.2, 30, 10, link=4),
        *device(60.5, 61, 30, link=5),
        # What no range has started belongs to none.
        *device(50, 51, 3, link=6),
    ]
    assert table(read_trace(write(tmp_path / "step.json", events))) == [
        [
            ("0RECV_F0", 0, 0),
            ("0F0", 5, 25),
            ("0F1", 26, 40),
            # An action without kernels is placed where the device was: after the one before it.
            ("0SEND_F1", 40, 40),
            ("0B0", 61, 91),
            ("0SEND_B0", 91, 91),
        ]
    ]


def test_kernels_of_one_launch_belong_together(tmp_path: Path) -> None:
    # A captured graph is one call that starts many kernels.
    events = [host("0F0", 0, 1), *device(0.5, 4, 2, link=1), *device(0.5, 8, 3, link=1)]
    assert table(read_trace(write(tmp_path / "step.json", events))) == [[("0F0", 0, 7)]]


def test_steps_on_a_device_are_separated_by_their_launches(tmp_path: Path) -> None:
    events = [
        host("0F0", 0, 1),
        host("0F0", 2, 1),
        *device(0.5, 10, 5, link=1),
        *device(2.5, 20, 7, link=2),
    ]
    file = write(tmp_path / "steps.json", events)
    assert table(read_trace(file, step=0)) == [[("0F0", 0, 5)]]
    assert table(read_trace(file, step=1)) == [[("0F0", 0, 7)]]


def test_work_of_which_nobody_knows_the_launch_is_passed_by(tmp_path: Path) -> None:
    kernel, _ = device(0.5, 10, 5, link=1)
    file = write(tmp_path / "step.json", [host("0F0", 2, 3), kernel])
    assert table(read_trace(file)) == [[("0F0", 0, 0)]]


def test_what_makes_no_timeline_is_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", in_turn("0F0", "0B0"))
    none = write(tmp_path / "none.json", [])
    two = write(tmp_path / "two.json", in_turn("1F0", "1F0"))
    said = [
        write(tmp_path / f"said{stage}.json", in_turn(f"{stage}F0"), distributedInfo={"rank": 3})
        for stage in range(2)
    ]
    negative = write(tmp_path / "negative.json", [host("0F0", 1, -2)])
    base = write(tmp_path / "base.json", in_turn("0F0"), baseTimeNanoseconds="soon")
    late = write(tmp_path / "late.json", [host("0F0", 1e307, 1e308)])
    far = write(tmp_path / "far.json", in_turn("0F0"), baseTimeNanoseconds=10**30)
    shared = [host("0F0", 0, 1), host("1F0", 0, 1, pid=71), *device(0.5, 1, 1, link=1)]
    merged = write(tmp_path / "merged.json", shared)
    kernel = device(0.5, 1, -1, link=1)
    backwards = write(tmp_path / "backwards.json", [host("0F0", 0, 1), *kernel])
    cases = {
        (merged,): f"{merged}: the trace has a device that 2 processes share; give the "
        "files of the ranks before they were merged",
        (backwards,): f"{backwards}: event 5: dur must be a number from 0 to 1e+150 (got -1)",
        (none,): f"{none}: the trace has no actions; profile a step of a pipeline with the "
        "host's activities",
        (one, two): f"{one}, {two}: all processes must have as many steps (1, 2); profile "
        "the same steps on every rank",
        tuple(said): f"{said[0]}, {said[1]}: two traces are of rank 3",
        (one, one): f"{one}, {one}: rank 0, position 0, 0F0: stage 0 also runs on rank 1; a stage "
        "must be on one rank",
        (negative,): f"{negative}: event 4: dur must be a number from 0 to 1e+150 (got -2)",
        (late,): f"{late}: event 4: ts must be a number from 0 to 1e+150 (got 1e+307)",
        (far,): f"{far}: baseTimeNanoseconds must be a whole number from 0 up (got {10**30})",
        (base,): f"{base}: baseTimeNanoseconds must be a whole number from 0 up (got 'soon')",
    }
    found = {}
    for files in cases:
        with pytest.raises(ParseError) as caught:
            read_trace(*files)
        found[files] = str(caught.value)
    assert found == cases


@pytest.mark.parametrize("step", [2, -3])
def test_a_missing_step_is_refused(step: int, tmp_path: Path) -> None:
    file = write(tmp_path / "steps.json", in_turn("0F0", "0B0", "0F0", "0B0"))
    with pytest.raises(ArgumentError) as caught:
        read_trace(file, step=step)
    assert str(caught.value) == f"step must be one of the trace's 2, from 0 (got {step})"
