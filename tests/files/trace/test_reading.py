"""Traces that we wrote come back as the timelines they were, and nothing else is taken for one."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import ParseError, PenstockError
from penstock.files.trace.reading import read_trace
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.trace import trace_lines, write_trace
from tests.strategies import dag_schedules, every_family, schedules
from tests.tables import read_schedule

COSTS = Costs(forward=1 / 3, transfer=0.1, activation_bytes=1e9)
SMALL = simulate(
    read_schedule("""
        0F0 0B0
        1F0 1B0
    """),
    Costs(activation_bytes=8),
)


def assert_same(found: Timeline, expected: Timeline) -> None:
    assert found.schedule == expected.schedule
    assert found.schedule.name == expected.schedule.name
    for column in ("start", "end", "memory"):
        np.testing.assert_array_equal(getattr(found, column), getattr(expected, column))


@pytest.mark.parametrize(("ranks", "suffix"), [(1, ".json"), (2, ".json.gz"), (4, ".json")])
def test_every_family_comes_back_exactly(ranks: int, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"trace{suffix}"
    for schedule in every_family(ranks, 8):
        for form in (schedule, lower(schedule)):
            timeline = simulate(form, COSTS)
            write_trace(timeline, file)
            assert_same(read_trace(file), timeline)


@given(st.data())
def test_any_times_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    schedule = data.draw(st.one_of(schedules(max_ranks=3, max_microbatches=3), dag_schedules()))
    seed = data.draw(st.integers(0, 2**32))
    generator = np.random.default_rng(seed)
    size = len(schedule.rows)
    start = generator.random(size) * 10.0 ** generator.integers(-9, 9, size)
    end = start + generator.random(size) * 10.0 ** generator.integers(-9, 9, size)
    timeline = Timeline(schedule, start, end, generator.random(size) * 1e12)
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(timeline, file)
    assert_same(read_trace(file), timeline)


def test_events_may_come_in_any_order(tmp_path: Path) -> None:
    timeline = simulate(lower(build("DualPipeV", ranks=2, microbatches=6)), COSTS)
    document = json.loads("".join(trace_lines(timeline)))
    random.Random(0).shuffle(document["traceEvents"])
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(document, indent=1))
    assert_same(read_trace(str(file)), timeline)


Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, e: e.update(name="0Q0"), "event 10: not a valid action: '0Q0' (expected"),
        (lambda _, e: e.update(name=3), "event 10: name must be a string (got 3)"),
        (
            lambda _, e: e.update(name="(0F0;0B0)OVERLAP_F_B"),
            "event 10: (0F0;0B0)OVERLAP_F_B holds several actions; give each an event of its own",
        ),
        (
            lambda _, e: e.update(ts="0"),
            "event 10: ts must be a number from 0 to 1e+150 (got '0')",
        ),
        (
            lambda _, e: e.update(ts=True),
            "event 10: ts must be a number from 0 to 1e+150 (got True)",
        ),
        (lambda _, e: e.pop("ts"), "event 10: ts must be a number from 0 to 1e+150 (got None)"),
        (
            lambda _, e: e.update(dur=-1),
            "event 10: dur must be a number from 0 to 1e+150 (got -1)",
        ),
        (
            lambda _, e: e.update(dur=10**400),
            "event 10: dur must be a number from 0 to 1e+150 (got 1000",
        ),
        (lambda _, e: e.update(pid=-1), "event 10: pid must be a whole number from 0 up (got -1)"),
        (
            lambda _, e: e.update(pid=0.5),
            "event 10: pid must be a whole number from 0 up (got 0.5)",
        ),
        (
            lambda d, _: [e.update(pid=7) for e in d["traceEvents"] if e["pid"] == 1],
            "process 1 has no event; processes must be numbered from 0",
        ),
        (lambda _, e: e.update(args=[]), "event 10: args must be an object (got [])"),
        (
            lambda _, e: e.update(args={}),
            "event 10: start must be a number from 0 to 1e+150 (got None)",
        ),
        (
            lambda _, e: e["args"].update(start=5),
            "event 10: ts and dur must agree with args (0 microseconds, 5 s)",
        ),
        (
            lambda _, e: e.update(dur=0) or e["args"].update(start=2e-9, end=1e-9),
            "event 10: 0F0 ends before it starts",
        ),
        (
            lambda _, e: e["args"].update(bytes=-8),
            "event 10: bytes must be a number from 0 to 1e+150 (got -8)",
        ),
        (lambda _, e: e["args"].update(row=1.0), "event 10: row must be a whole number from 0 up"),
        (lambda _, e: e["args"].update(row=1), "row 0 of process 0 has no event before this one"),
        (lambda _, e: e["args"].update(row=9), "event 12: row 0 of process 0 has no event before"),
        (
            lambda _, e: e["args"].update(joined=1),
            "event 10: joined must be true or left out (got 1)",
        ),
        (
            lambda _, e: e["args"].update(joined=True),
            "event 10: a joined row must follow another row",
        ),
        (
            lambda d, _: d["otherData"].update(format="penstock trace 9"),
            "format must be 'penstock trace 1'",
        ),
        (lambda d, _: d["otherData"].update(name=3), "name in otherData must be a string (got 3)"),
        (
            lambda d, _: d["otherData"].update(edges=[[0]]),
            "edges in otherData must be pairs of stages",
        ),
        (
            lambda d, _: d["otherData"].update(edges=[[1, 0]]),
            "an edge must go from a lower to a hig",
        ),
        (
            lambda d, _: d["otherData"].update(parts="01"),
            "parts in otherData must be whole numbers, ",
        ),
        (
            lambda d, _: d["otherData"].update(parts=[0]),
            "an edge must go from a lower to a higher ",
        ),
        (lambda d, _: d.update(traceEvents=[]), "the trace has no events after its header"),
        (
            lambda d, _: d["traceEvents"].clear() or d["traceEvents"].append({"ph": "M"}),
            "the trace has no actions",
        ),
        (lambda d, e: d["traceEvents"].append(e), "row 0 of process 0 appears twice"),
        (lambda d, _: d.update(otherData=d.pop("otherData")), "the trace has no events after"),
    ],
)
def test_damaged_trace_of_ours_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    document = json.loads("".join(trace_lines(SMALL)))
    first = document["traceEvents"][10]
    assert (first["ph"], first["name"]) == ("X", "0F0")
    change(document, first)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ParseError) as caught:
        read_trace(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_stage_on_two_ranks_is_refused_by_the_file(tmp_path: Path) -> None:
    text = "".join(trace_lines(SMALL)).replace('"1F0"', '"0F0"')
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(ParseError, match=r"trace\.json: .*a stage must be on one rank"):
        read_trace(file)


def test_a_trace_of_ours_is_read_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(SMALL, file)
    with pytest.raises(ParseError, match="this trace has all ranks; read it by itself"):
        read_trace(file, file)


def test_damaged_files_give_a_timeline_or_our_error(tmp_path: Path) -> None:
    good = "".join(trace_lines(SMALL))
    alphabet = '0123456789.-eE"{}[],: FBXnulltrue\\\x00é'
    generator = random.Random(0)
    file = tmp_path / "trace.json"
    refused = []
    for _ in range(400):
        damaged = list(good)
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(len(damaged))
            damaged[place : place + generator.randint(0, 3)] = generator.choice(alphabet)
        file.write_text("".join(damaged), encoding="utf-8")
        try:
            assert isinstance(read_trace(file), Timeline)
        except PenstockError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(message.startswith(f"{file}: ") for message in refused)
