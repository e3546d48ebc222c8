"""`penstock revise`: prediction beside recording, and the better plan."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.assembly import lower
from penstock.cli import main
from penstock.costs import Costs
from penstock.files.timeline import write_timeline
from penstock.planner.plans import Plan
from penstock.sim.engine import simulate
from penstock.sim.recorded.review import review
from tests.planner.test_revision import GUESS, TRUTH, make_plan


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
    assert f"{tmp_path / 'step.json'}\n                 predicted s  recorded s  ratio\n" in output
    assert "\nstage 0 F, each            1         1.5   1.50\n" in output
    assert "run the new plan" in output
    better = Plan.from_file(tmp_path / "better.json")
    assert better.timeline.end_time < simulate(make_plan().schedule, TRUTH).end_time


def test_old_plan_is_kept_if_the_gain_is_too_small(tmp_path: Path) -> None:
    code, output = run(tmp_path, TRUTH, "--least-gain", "1", "-o", str(tmp_path / "same.json"))
    assert code == 0
    assert "keep the old one" in output
    assert Plan.from_file(tmp_path / "same.json").schedule == make_plan().schedule


def test_causes_of_the_difference_add_up_and_advice_follows(tmp_path: Path) -> None:
    code, output = run(tmp_path, TRUTH, "--html", str(tmp_path / "both.html"))
    assert code == 0
    recorded = simulate(lower(make_plan().schedule), TRUTH)
    assert f"\n\n{review(make_plan().timeline, recorded).difference}\n" in output
    page = (tmp_path / "both.html").read_text()
    assert "Why the step took another time than predicted" in page
    _, text = run(tmp_path, TRUTH, "--json")
    values = json.loads(text)
    (step,) = values["steps"]
    assert sum(step["difference"]["by_cause"].values()) == pytest.approx(
        step["step"]["recorded"] - step["step"]["predicted"]
    )
    assert values["is_offered"]
    assert values["new_seconds"] == pytest.approx(values["old_seconds"] * (1 - values["gain"]))


def test_uneven_ranks_are_named_if_an_order_cannot_help(tmp_path: Path) -> None:
    _, output = run(tmp_path, TRUTH)
    assert "rank 0 computes 12 s more than the average; another cut may save up to that" in output
    _, even = run(tmp_path, GUESS)
    assert "another cut" not in even


def test_error_names_a_file_that_is_not_a_recorded_step(tmp_path: Path) -> None:
    make_plan().to_file(tmp_path / "plan.json")
    file = str(tmp_path / "plan.json")
    result = CliRunner().invoke(main, ["revise", file, file])
    assert result.exit_code == 2
    assert result.output == (
        f"penstock: {file} must be a recorded timeline or a trace (got a plan)\n"
    )
