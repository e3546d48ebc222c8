"""Timelines come back from files unchanged, and other files are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import ParseError
from penstock.files.timeline import read_timeline, write_timeline
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate

GOOD: dict[str, Any] = {
    "name": "mine",
    "schedule": ["0F0,0B0", "1F0,1B0"],
    "start": [[0.0, 3.0], [1.0, 2.0]],
    "end": [[1.0, 4.0], [2.0, 3]],
    "bytes": [[8.0, 0], [8, 0.0]],
}


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES])
def test_every_timeline_comes_back_unchanged(name: str, is_lowered: bool, tmp_path: Path) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    costs = Costs(forward=1 / 3, transfer=0.1, activation_bytes=1e9)
    timeline = simulate(lower(schedule) if is_lowered else schedule, costs)
    write_timeline(timeline, tmp_path / "step.json")
    again = read_timeline(tmp_path / "step.json")
    assert again.schedule == timeline.schedule
    assert again.schedule.name == name
    for column in ("start", "end", "memory"):
        np.testing.assert_array_equal(getattr(again, column), getattr(timeline, column))


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps(GOOD))
    timeline = read_timeline(str(file))
    assert timeline.schedule == Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]])
    assert (timeline.end_time, timeline.rank_peak_bytes) == (4.0, (8.0, 8.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"more": 1},
            "a timeline must be an object with the fields name, schedule, start, end, bytes",
        ),
        ({"name": 3}, "name must be a string (got 3)"),
        ({"schedule": "0F0"}, "schedule must be a list of strings, one per rank"),
        ({"schedule": ["0F0", 1]}, "schedule must be a list of strings, one per rank"),
        (
            {"schedule": ["0F0,0Q0", "1F0"]},
            "rank 0, cell 1: not a valid action: '0Q0' (expected STAGE KIND MICROBATCH, e.g. 2F0)",
        ),
        ({"schedule": []}, "the file is empty; write one line per rank, one action per cell"),
        ({"start": [[0, 3]]}, "start must have a list of numbers for each of the 2 ranks"),
        ({"start": 3}, "start must have a list of numbers for each of the 2 ranks"),
        ({"end": [[1, 4], [2]]}, "end of rank 1 must have a number for each of its 2 actions"),
        ({"end": [[1, 4], 2]}, "end of rank 1 must have a number for each of its 2 actions"),
        (
            {"end": [[1, True], [2, 3]]},
            "end of rank 0 must be numbers from 0 to 1e+150 (got True)",
        ),
        ({"end": [[1, "4"], [2, 3]]}, "end of rank 0 must be numbers from 0 to 1e+150 (got '4')"),
        (
            {"bytes": [[-1, 0], [0, 0]]},
            "bytes of rank 0 must be numbers from 0 to 1e+150 (got -1)",
        ),
        ({"end": [[1, float("nan")], [2, 3]]}, "NaN is not a valid number"),
        ({"end": [[1, float("inf")], [2, 3]]}, "Infinity is not a valid number"),
        ({"end": [[1, 4], [2, 1.5]]}, "rank 1, position 1, 1B0 ends before it starts"),
    ],
)
def test_invalid_timeline_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps(GOOD | change))
    with pytest.raises(ParseError) as caught:
        read_timeline(file)
    assert str(caught.value) == f"{file}: {message}"


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_any_other_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_bytes(content)
    with pytest.raises(ParseError, match=r"step\.json: "):
        read_timeline(file)


def test_a_number_beyond_all_floats_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text(json.dumps(GOOD).replace("8.0", f"1{'0' * 400}"))
    with pytest.raises(ParseError, match=r"step\.json: "):
        read_timeline(file)
