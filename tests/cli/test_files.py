"""Every command takes the files that other commands write: plans, recorded steps and traces."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.assembly import lower
from penstock.cli import main
from penstock.costs import Costs
from penstock.files.timeline import write_timeline
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view import draw, write_trace

COSTS = Costs(forward=2, transfer=0.25)
RECORDED_COSTS = Costs(forward=3, transfer=0.5)


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        main, list(map(str, arguments))
    )


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    """Write plan.json, recorded.json and step.json, as `penstock demo` and `show --trace` do."""
    found = plan(COSTS, ranks=2, microbatches=3, seconds=0, placement="loop")
    found.to_file(tmp_path / "plan.json")
    write_timeline(record(found), tmp_path / "recorded.json")
    write_trace(record(found), tmp_path / "step.json")
    return found


def record(found: Plan) -> Timeline:
    return simulate(lower(found.schedule), RECORDED_COSTS)


# E5: only .csv was taken for a file, so the demo's own plan.json was looked up as a family.
def test_show_draws_a_plan_with_its_own_costs(planned: Plan, tmp_path: Path) -> None:
    result = run("show", tmp_path / "plan.json")
    assert (result.exit_code, result.stdout) == (0, f"{draw(planned, width=80)}\n")
    result = run("show", tmp_path / "plan.json", "--forward", "5", "--json")
    expected = simulate(planned.schedule, Costs(forward=5))
    assert json.loads(result.stdout)["end_time"] == expected.end_time


@pytest.mark.parametrize("name", ["recorded.json", "step.json"])
def test_show_draws_a_recorded_step_with_its_own_times(
    planned: Plan, name: str, tmp_path: Path
) -> None:
    result = run("show", tmp_path / name)
    assert (result.exit_code, result.stdout) == (0, f"{draw(record(planned), width=80)}\n")


# E5: `trace` gave a timeline that `write_timeline` wrote to the reader of traces.
@pytest.mark.parametrize("name", ["recorded.json", "step.json"])
def test_trace_shows_a_recorded_timeline_like_its_trace(
    planned: Plan, name: str, tmp_path: Path
) -> None:
    result = run("trace", tmp_path / name)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{draw(record(planned), width=80)}\n\nschedule  end time s")


@pytest.mark.parametrize("name", ["plan.json", "recorded.json", "step.json"])
@pytest.mark.parametrize(
    "arguments",
    [("check",), ("simulate",), ("explain",), ("compare", "1F1B", "-r", "2", "-m", "3")],
)
@pytest.mark.usefixtures("planned")
def test_every_command_that_takes_a_schedule_takes_files(
    arguments: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    command, *others = arguments
    result = run(command, tmp_path / name, *others)
    assert (result.exit_code, result.stderr) == (0, "")


def test_explain_uses_the_costs_of_a_plan(planned: Plan, tmp_path: Path) -> None:
    found = json.loads(run("explain", tmp_path / "plan.json", "--json").stdout)
    assert found["end_time"] == planned.timeline.end_time


def test_compare_uses_the_costs_of_the_first_plan(planned: Plan, tmp_path: Path) -> None:
    arguments = ("compare", tmp_path / "plan.json", "1F1B", "-r", "2", "-m", "3", "--json")
    found = json.loads(run(*arguments).stdout)
    alone = compare([planned.schedule], planned.problem.costs)
    assert found[planned.schedule.name]["end_time"] == planned.timeline.end_time
    assert [timeline.end_time for timeline in alone.values()] == [planned.timeline.end_time]
    assert found["1F1B"]["end_time"] > 3 * 4


def test_verify_runs_the_schedule_of_a_plan(planned: Plan, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = run("verify", tmp_path / "plan.json", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["schedule"].startswith(
        f"{planned.problem.ranks} ranks, {planned.problem.stages} stages"
    )


def test_lowered_plan_has_communication(planned: Plan, tmp_path: Path) -> None:
    result = run("show", tmp_path / "plan.json", "--lower", "--json")
    expected = [[str(work) for work in order] for order in lower(planned.schedule).orders]
    assert json.loads(result.stdout)["orders"] == expected


@pytest.mark.usefixtures("planned")
def test_revise_takes_a_trace(tmp_path: Path) -> None:
    files = (tmp_path / "plan.json", tmp_path / "step.json")
    result = run("revise", *files, "--seconds", "0.2")
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.usefixtures("planned")
def test_trace_rejects_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = run("trace", file)
    assert (result.exit_code, result.stderr) == (
        2,
        f"penstock: {file} must be a recorded timeline or a trace (got a plan)\n",
    )
