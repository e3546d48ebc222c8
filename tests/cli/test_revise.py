"""`penstock revise`: prediction beside recording, and the better plan."""

from pathlib import Path

from click.testing import CliRunner

from penstock.assembly import lower
from penstock.cli import main
from penstock.costs import Costs
from penstock.files.timeline import write_timeline
from penstock.planner.plans import Plan
from penstock.sim.engine import simulate
from tests.planner.test_revision import TRUTH, make_plan


def run(folder: Path, truth: Costs, *options: str) -> tuple[int, str]:
    plan = make_plan()
    plan.to_file(folder / "plan.json")
    write_timeline(simulate(lower(plan.schedule), truth), folder / "step.json")
    files = [str(folder / "plan.json"), str(folder / "step.json")]
    result = CliRunner().invoke(main, ["revise", *files, "--seconds", "1", *options])
    return result.exit_code, result.output


def test_prediction_and_recording_are_printed_and_a_better_plan_is_written(tmp_path: Path) -> None:
    code, output = run(tmp_path, TRUTH, "--output", str(tmp_path / "better.json"))
    assert code == 0
    assert f"{tmp_path / 'step.json'}\n                predicted  recorded  ratio\n" in output
    assert "\nstage 0 F               1       1.5   1.50\n" in output
    assert "run the new plan" in output
    better = Plan.from_file(tmp_path / "better.json")
    assert better.timeline.end_time < simulate(make_plan().schedule, TRUTH).end_time


def test_old_plan_is_kept_if_the_gain_is_too_small(tmp_path: Path) -> None:
    code, output = run(tmp_path, TRUTH, "--least-gain", "1", "-o", str(tmp_path / "same.json"))
    assert code == 0
    assert "keep the old one" in output
    assert Plan.from_file(tmp_path / "same.json").schedule == make_plan().schedule


def test_error_names_a_file_that_is_not_a_recorded_step(tmp_path: Path) -> None:
    make_plan().to_file(tmp_path / "plan.json")
    file = str(tmp_path / "plan.json")
    result = CliRunner().invoke(main, ["revise", file, file])
    assert result.exit_code == 2
    assert result.output == (
        f"penstock: {file} must be a recorded timeline or a trace (got a plan)\n"
    )
