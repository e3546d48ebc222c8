"""`penstock show --trace` and `penstock trace`: output, files and errors."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from penstock.assembly import build
from penstock.cli import main
from penstock.costs import Costs
from penstock.errors import ParseError, PenstockError
from penstock.files.trace.reading import read_trace
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate

PICTURE = """\
rank 0  F0------F1------................B0--------------........B1--------------
rank 1  ........F0------B0--------------F1------B1--------------................
        |0 s    |1      |2      |3      |4      |5      |6      |7      |8
        F Forward   B Full backward   . Idle
"""
TABLES = """
schedule  end time s  ratio  bubble  peak microbatches
1F1B               9  1.000  33.3 %                  2

rank  stages  busy s  idle s  bubble  peak activations
0          0       6       3  33.3 %                 2
1          1       6       3  33.3 %                 1
"""


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        main, list(map(str, arguments))
    )


def write(folder: Path) -> Path:
    file = folder / "step.json"
    result = run("show", "1F1B", "-r", "2", "-m", "2", "--trace", file)
    assert (result.exit_code, result.stdout, result.stderr) == (0, PICTURE, f"wrote {file}\n")
    return file


def test_show_writes_a_trace_and_trace_shows_it(tmp_path: Path) -> None:
    result = run("trace", write(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert "\n".join(lines) + "\n" == PICTURE + TABLES


def test_trace_has_the_requested_costs_and_communication(tmp_path: Path) -> None:
    file = tmp_path / "step.json.gz"
    run("show", "ZBV", "-r", "2", "-m", "4", "--lower", "--forward", "2.5", "--trace", file)
    assert gzip.decompress(file.read_bytes())
    timeline = read_trace(file)
    expected = simulate(timeline.schedule, Costs(forward=2.5))
    assert timeline.schedule.has_communication
    np.testing.assert_array_equal(timeline.end, expected.end)


def test_trace_writes_a_schedule_a_page_and_figures(tmp_path: Path) -> None:
    csv, html, svg = (tmp_path / f"step.{suffix}" for suffix in ("csv", "html", "svg"))
    result = run("trace", write(tmp_path), "--csv", csv, "--html", html, "--svg", svg)
    assert (result.exit_code, result.stderr) == (0, f"wrote {csv}\nwrote {html}\nwrote {svg}\n")
    assert Schedule.from_csv(csv) == build("1F1B", ranks=2, microbatches=2)
    assert html.read_text().lower().startswith("<!doctype html>")
    assert svg.read_bytes().startswith(b"<?xml")


def test_trace_prints_json(tmp_path: Path) -> None:
    found = json.loads(run("trace", write(tmp_path), "--json").stdout)
    assert (found["name"], found["ranks"], found["end_time"]) == ("1F1B", 2, 9.0)


def test_profiles_of_all_ranks_are_joined_and_a_step_is_selected(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        events = [
            {"ph": "X", "cat": "user_annotation", "name": f"{rank}{kind}0", "pid": 7, "ts": ts}
            | {"dur": 10}
            for ts, kind in enumerate("FBFB")
        ]
        files.append(tmp_path / f"rank{rank}.json")
        files[-1].write_text(json.dumps({"traceEvents": events}))
    result = run("trace", *files, "--step", "0", "--json")
    assert json.loads(result.stdout)["orders"] == [["0F0", "0B0"], ["1F0", "1B0"]]
    with pytest.raises(PenstockError) as error:
        read_trace(*files, step=2)
    result = run("trace", *files, "--step", "2")
    assert (result.exit_code, result.stdout, result.stderr) == (
        2,
        "",
        f"penstock: {error.value}\n",
    )


def test_error_names_a_file_that_is_not_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    file.write_text('{"traceEvents": [{"ph": "X"}')
    with pytest.raises(ParseError) as error:
        read_trace(file)
    result = run("trace", file)
    assert (result.exit_code, result.stdout, result.stderr) == (
        2,
        "",
        f"penstock: {error.value}\n",
    )
    assert str(file) in str(error.value)
