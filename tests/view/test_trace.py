"""Traces have the format that viewers require, and match their timeline."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.trace import trace_lines, write_trace
from tests.strategies import costs, dag_schedules, every_family, schedules
from tests.tables import read_schedule
from tests.view.timelines import EVERY_FAMILY, EVERY_NAME
from tests.view.trace_format import Events, check_trace, flows_of


def events_of(timeline: Timeline) -> Events:
    """Return the events of a timeline's trace after checking them."""
    return check_trace("".join(trace_lines(timeline)))


def of_phase(events: Events, phase: str, *names: str) -> list[Any]:
    """Return some fields of all events of a phase."""
    return [tuple(event[n] for n in names) for event in events if event["ph"] == phase]


def test_trace_of_one_microbatch_on_two_ranks() -> None:
    schedule = read_schedule("""
        0F0 0B0
        1F0 1B0
    """)
    timeline = simulate(schedule, Costs(transfer=0.5, activation_bytes=8))
    assert "".join(trace_lines(timeline)).splitlines()[0] == (
        '{"displayTimeUnit": "ms", "otherData": {"format": "penstock trace 1", "name": "custom", '
        '"edges": [[0, 1]], "parts": [0, 1]}, "traceEvents": ['
    )
    message = {"name": "message", "cat": "message"}
    forward = {"cat": "forward", "cname": "rail_response"}
    backward = {"cat": "full_backward", "cname": "terrible"}

    def arguments(stage: int, held: float, row: int, start: float, end: float) -> dict[str, Any]:
        times = {"start": start, "end": end}
        return {"stage": stage, "microbatch": 0, "bytes": held, **times, "row": row}

    events = events_of(timeline)
    first, second = {"pid": 0, "tid": 1}, {"pid": 1, "tid": 2}
    assert [event for event in events if event["ph"] in "Xsf"] == [
        first
        | forward
        | {"ph": "X", "name": "0F0", "ts": 0, "dur": 1e6, "args": arguments(0, 8, 0, 0, 1)},
        first | message | {"ph": "s", "id": 1, "ts": 0.5e6},
        first
        | backward
        | {"ph": "X", "name": "0B0", "ts": 5e6, "dur": 2e6, "args": arguments(0, 0, 1, 5, 7)},
        first | message | {"ph": "f", "bp": "e", "id": 0, "ts": 6e6},
        second
        | forward
        | {
            "ph": "X",
            "name": "1F0",
            "ts": 1.5e6,
            "dur": 1e6,
            "args": arguments(1, 8, 0, 1.5, 2.5),
        },
        second | message | {"ph": "f", "bp": "e", "id": 1, "ts": 2e6},
        second
        | backward
        | {
            "ph": "X",
            "name": "1B0",
            "ts": 2.5e6,
            "dur": 2e6,
            "args": arguments(1, 0, 1, 2.5, 4.5),
        },
        second | message | {"ph": "s", "id": 0, "ts": 3.5e6},
    ]
    assert of_phase(events, "C", "name", "pid", "ts", "args") == [
        ("memory", 0, 0, {"bytes": 8}),
        ("memory", 0, 7e6, {"bytes": 0}),
        ("memory", 1, 1.5e6, {"bytes": 8}),
        ("memory", 1, 4.5e6, {"bytes": 0}),
    ]


def test_ranks_are_processes_and_their_streams_threads() -> None:
    timeline = simulate(lower(build("1F1B", ranks=2, microbatches=2)))
    events = events_of(timeline)
    assert of_phase(events, "M", "name", "pid", "args") == [
        ("process_name", 0, {"name": "rank 0"}),
        ("process_labels", 0, {"labels": "stages 0"}),
        ("process_sort_index", 0, {"sort_index": 0}),
        ("process_name", 1, {"name": "rank 1"}),
        ("process_labels", 1, {"labels": "stages 1"}),
        ("process_sort_index", 1, {"sort_index": 1}),
        ("thread_name", 0, {"name": "compute"}),
        ("thread_sort_index", 0, {"sort_index": 1}),
        ("thread_name", 0, {"name": "communication"}),
        ("thread_sort_index", 0, {"sort_index": 2}),
        ("thread_name", 1, {"name": "compute"}),
        ("thread_sort_index", 1, {"sort_index": 3}),
        ("thread_name", 1, {"name": "communication"}),
        ("thread_sort_index", 1, {"sort_index": 4}),
    ]


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_family_has_a_well_formed_trace_with_an_arrow_per_message(name: str) -> None:
    timeline = EVERY_FAMILY[name]
    events = events_of(timeline)
    rows = timeline.schedule.rows
    slices = [e for e in events if e["ph"] == "X"]
    assert sorted(
        (e["pid"], e["args"]["row"], e["name"], e["args"]["start"], e["args"]["end"])
        for e in slices
    ) == [
        (
            rows.rank(row),
            row - int(rows.first[rows.rank(row)]),
            str(rows.action(row)),
            timeline.start[row],
            timeline.end[row],
        )
        for row in range(len(rows))
    ]
    assert flows_of(events) == sorted(values_between_ranks(timeline.schedule))


def values_between_ranks(schedule: Schedule) -> list[tuple[str, str]]:
    """Return the pairs of actions between which a value crosses ranks."""
    rows, flow = schedule.rows, schedule.dataflow
    holder = schedule.placement.rank_of_stage
    actions = [rows.action(row) for row in range(len(rows))]
    forwards = {(a.stage, a.microbatch): str(a) for a in actions if a.kind is Kind.FORWARD}
    kinds = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
    backwards = {(a.stage, a.microbatch): str(a) for a in actions if a.kind in kinds}
    found = []
    for producer, consumer in flow.edges:
        if holder[producer] != holder[consumer]:
            for stage, microbatch in forwards:
                if stage == producer:
                    found.append((forwards[producer, microbatch], forwards[consumer, microbatch]))
            for stage, microbatch in backwards:
                if stage == producer:
                    found.append(
                        (backwards[consumer, microbatch], backwards[producer, microbatch])
                    )
    return found


@pytest.mark.parametrize("receives", ["early", "late"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
def test_with_communication_every_send_has_an_arrow_to_its_receive(
    ranks: int, receives: Any
) -> None:
    for schedule in every_family(ranks, 2 * ranks):
        timeline = simulate(lower(schedule, receives=receives), Costs(forward=1.1, transfer=0.3))
        events = events_of(timeline)
        sends = [n for (n,) in of_phase(events, "X", "name") if "SEND" in n]
        arrows = flows_of(events)
        assert [start for start, _ in arrows] == sorted(sends)
        for start, end in arrows:
            stage, _, microbatch = start.partition("SEND_")
            step = 1 if microbatch[0] == "F" else -1
            assert end == f"{int(stage) + step}RECV_{microbatch}"


@given(st.data())
def test_any_schedule_and_costs_give_a_well_formed_trace(data: st.DataObject) -> None:
    schedule = data.draw(st.one_of(schedules(max_ranks=4, max_microbatches=6), dag_schedules()))
    schedule = lower(schedule) if data.draw(st.booleans()) else schedule
    events_of(simulate(schedule, data.draw(costs(schedule))))


def test_memory_counters_have_the_peaks_of_every_rank() -> None:
    for price in (Costs(activation_bytes=3, weight_stash_bytes=1, parameter_bytes=7), Costs()):
        for schedule in every_family(4, 8):
            timeline = simulate(lower(schedule), price)
            unit = "bytes" if timeline.peak_bytes else "activations"
            peaks = [0.0] * schedule.num_ranks
            for rank, arguments in of_phase(events_of(timeline), "C", "pid", "args"):
                peaks[rank] = max(peaks[rank], arguments[unit])
            expected = timeline.rank_peak_activations
            assert peaks == list(timeline.rank_peak_bytes if timeline.peak_bytes else expected)


def test_arrows_never_go_back_in_time_if_clocks_disagree() -> None:
    schedule = read_schedule("""
        0F0 0B0
        1F0 1B0
    """)
    # By its own clock, rank 1 finishes before rank 0 begins.
    start, end = np.array([9.0, 14.0, 1.0, 2.0]), np.array([10.0, 15.0, 2.0, 4.0])
    events = events_of(Timeline(schedule, start, end, np.zeros(4)))
    assert flows_of(events) == [("1B0", "0B0")]


def test_overlapped_actions_have_separate_lanes() -> None:
    events = events_of(simulate(build("DualPipeV", ranks=2, microbatches=6)))
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["compute", "compute 2"] * 2


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_trace_file_has_the_lines_and_is_compressed_by_suffix(suffix: str, tmp_path: Path) -> None:
    timeline = simulate(build("ZBV", ranks=2, microbatches=4))
    file = tmp_path / f"trace{suffix}"
    write_trace(timeline, file)
    content = file.read_bytes()
    text = (gzip.decompress(content) if suffix == ".json.gz" else content).decode()
    assert text == "".join(trace_lines(timeline))
    assert json.loads(text)["traceEvents"]
