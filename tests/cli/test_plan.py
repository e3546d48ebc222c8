"""`penstock plan` as a user runs it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import main
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan

SMALL = ("--ranks", "2", "--microbatches", "3", "--seconds", "0.2")
LAYERS = """
transfer = 0.1

[[layers]]
name = "block"
repeat = 6
forward = 1.0
backward_input = 1.0
backward_weight = 1.0
parameter_bytes = 10
activation_bytes = 8
message_bytes = 1
"""


def run(*arguments: object) -> Result:
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})
    return runner.invoke(main, ["plan", *map(str, arguments)])


def test_plan_prints_a_summary_and_a_picture() -> None:
    lines = run(*SMALL, "--placement", "loop").output.splitlines()
    assert lines[0].endswith(": 2 ranks, 2 stages (loop), 3 microbatches")
    assert lines[1].startswith("end time 10 s, bubble 10.0 %, at most 0.0 % above the proven")
    assert [line[:6] for line in lines[3:5]] == ["rank 0", "rank 1"]


def test_costs_come_from_a_file_and_options_override_them(tmp_path: Path) -> None:
    file = tmp_path / "costs.toml"
    Costs(forward=2, transfer=0.5).to_file(file)
    result = run(file, *SMALL, "--placement", "loop", "--transfer", "0", "--json")
    costs = json.loads(result.output)["costs"]
    assert (costs["forward"], costs["transfer"]) == ([2, 2], 0)


def test_output_folder_has_the_plan_its_schedule_and_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run(*SMALL, "--activation-bytes", "1KiB", "--memory", "3KiB", "-o", folder)
    assert result.exit_code == 0
    plan = Plan.from_file(folder / "plan.json")
    assert plan.problem.memory == (3072, 3072)
    assert plan.schedule == Schedule.from_csv(folder / "schedule.csv")
    report = (folder / "report.md").read_text()
    assert report.startswith(f"# Plan: {plan.schedule.name}\n")
    assert [line for line in result.output.splitlines() if line.startswith("wrote ")] == [
        f"wrote {folder / name}" for name in ("schedule.csv", "plan.json", "report.md")
    ]


def test_limit_that_is_too_small_exits_with_one_line() -> None:
    result = run(*SMALL, "--activation-bytes", "100", "--memory", "60", "--placement", "loop")
    assert (result.exit_code, result.output) == (
        2,
        "penstock: rank 0 needs 100 bytes for one microbatch at a time (0 of them all the time), "
        "40 more than its limit of 60; a limit of 100 bytes per rank would do, or smaller "
        "microbatches, more ranks, or checkpointed stages\n",
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e3", 1000),
        ("40GiB", 40 * 2**30),
        ("80 GB", 80e9),
        ("1.5kB", 1500),
        ("7b", 7),
        ("2mib", 2 * 2**20),
    ],
)
def test_memory_limit_may_have_a_unit(text: str, number: float) -> None:
    result = run(*SMALL, "--memory", text, "--json")
    assert json.loads(result.output)["memory"] == [number, number]


@pytest.mark.parametrize("text", ["many", "-1", "3 XB", "GiB", "inf", "1e400", "nan"])
def test_invalid_memory_limit_is_rejected(text: str) -> None:
    result = run(*SMALL, "--memory", text)
    assert result.exit_code == 2
    assert f"'{text}' must be a number of bytes, such as 1e9, 512MiB or 40GiB" in result.output


def test_search_prints_a_table_and_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "layers.toml"
    file.write_text(LAYERS)
    options = ("--search", "--ranks", "2", "--batch", "4", "--seconds", "0.5")
    result = run(file, *options, "--memory", "100", "-o", tmp_path / "plan")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split()[:2] == ["end", "time"]
    assert any(line.startswith("1: fastest; ") for line in lines)
    plan = Plan.from_file(tmp_path / "plan" / "plan.json")
    assert plan.choices is not None
    assert sum(plan.choices.sizes) == 6
    assert "## Other plans" in (tmp_path / "plan" / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--search"],
            "--search needs a file of layers and the rows of a batch; write penstock plan "
            "layers.toml --search --batch 64",
        ),
        (
            ["--batch", "4"],
            "--batch works with --search only; use --microbatches instead",
        ),
        (
            ["--search", "--forward", "2"],
            "--search chooses the placement and reads all costs from COSTS; leave out --placement "
            "and the options for costs",
        ),
    ],
)
def test_options_that_exclude_each_other_are_rejected(options: list[str], message: str) -> None:
    result = run(*options)
    assert (result.exit_code, result.output) == (2, f"penstock: {message}\n")
