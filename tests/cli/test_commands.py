"""The command line: output, files and exit codes. Two tests start real processes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.cli import main
from penstock.errors import ParseError
from penstock.ir.schedule import Schedule
from tests.tables import read_schedule

SIZE = ("--ranks", "2", "--microbatches", "2")
FINE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
TWICE = "0F0,0F0,0B0\n"
STUCK = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"
SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(
        main, list(map(str, arguments))
    )


def fail(*arguments: str | Path) -> tuple[int, str]:
    """Return the exit code and the message of a command that prints only the message."""
    result = run(*arguments)
    assert result.stdout == ""
    return result.exit_code, result.stderr.rstrip("\n")


def write(folder: Path, text: str, name: str = "mine.csv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_show_draws_to_scale() -> None:
    result = run("show", "1F1B", *SIZE)
    assert result.exit_code == 0
    assert result.output == (
        "rank 0  F0------F1------................B0--------------........B1--------------\n"
        "rank 1  ........F0------B0--------------F1------B1--------------................\n"
        "        |0 s    |1      |2      |3      |4      |5      |6      |7      |8\n"
        "        F Forward   B Full backward   . Idle\n"
    )


def test_show_prints_the_actions_as_a_table() -> None:
    assert run("show", "1F1B", *SIZE, "--table").output == (
        "   rank 0  rank 1\n0  0F0     1F0\n1  0F1     1B0\n2  0B0     1F1\n3  0B1     1B1\n"
    )


def test_schedule_written_by_show_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "lowered.csv"
    result = run("show", "ZBV", *SIZE, "--lower", "--csv", file)
    assert (result.exit_code, result.stderr) == (0, f"wrote {file}\n")
    assert Schedule.from_csv(file) == lower(build("ZBV", ranks=2, microbatches=2))


@pytest.mark.parametrize("name", SIGNATURES)
def test_show_writes_figures(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    result = run("show", "1F1B", *SIZE, f"--{name}", tmp_path / f"figure.{name}")
    assert (result.exit_code, result.stderr) == (0, f"wrote {tmp_path / 'figure'}.{name}\n")
    assert (tmp_path / f"figure.{name}").read_bytes().startswith(SIGNATURES[name])


def test_figure_gets_its_ending_if_it_has_another(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("compare", "1F1B", "ZBV", *SIZE, "--svg", tmp_path / "v1.2")
    assert (result.exit_code, result.stderr) == (0, f"wrote {tmp_path / 'v1.2.svg'}\n")
    assert (tmp_path / "v1.2.svg").read_bytes().startswith(b"<?xml")


def test_check_says_that_a_schedule_is_valid(tmp_path: Path) -> None:
    result = run("check", write(tmp_path, FINE))
    assert (result.exit_code, result.output) == (
        0,
        "valid: 2 ranks, 2 stages (loop placement), 2 microbatches, 8 actions; "
        "it finishes (directed channels)\n",
    )
    result = run("check", "ZBV", *SIZE, "--lower", "--channels", "shared")
    assert (result.exit_code, result.output) == (
        0,
        "valid: 2 ranks, 4 stages (v placement), 2 microbatches, 52 actions; "
        "it finishes (shared channels)\n",
    )


@pytest.mark.parametrize(("text", "rule"), [(TWICE, "once"), (STUCK, "deadlock")])
def test_check_prints_every_problem_and_exits_with_one(
    tmp_path: Path, text: str, rule: str
) -> None:
    file = write(tmp_path, text)
    problems = find_problems(Schedule.from_csv(file))
    result = run("check", file)
    assert [problem.rule for problem in problems] == [rule]
    assert (result.exit_code, result.output) == (1, f"{problems[0]}\n")


def test_check_calls_a_placement_what_plan_calls_it() -> None:
    # `check` said "loop" of what `plan` and its options call interleaved.
    sizes = ("--ranks", "2", "--microbatches", "4")
    checked = run("check", "Interleaved1F1B", *sizes)
    planned = run("plan", *sizes, "--placement", "interleaved", "--seconds", "0.1")
    for found in (checked.output, planned.output):
        assert "2 ranks, 4 stages (interleaved" in found


def test_check_prints_json_with_the_same_exit_code(tmp_path: Path) -> None:
    file = write(tmp_path, TWICE)
    (problem,) = find_problems(Schedule.from_csv(file))
    result = run("check", file, "--json")
    assert result.exit_code == 1
    assert json.loads(result.output) == {
        "schedule": "1 ranks, 1 stages (loop placement), 1 microbatches, 3 actions",
        "is_fine": False,
        "problems": [
            {
                "rule": "once",
                "rank": 0,
                "position": 1,
                "action": "0F0",
                "message": problem.message,
            }
        ],
    }


@pytest.mark.parametrize("command", ["show", "simulate", "compare", "explain"])
def test_commands_exit_with_one_for_an_invalid_schedule(tmp_path: Path, command: str) -> None:
    file = write(tmp_path, TWICE)
    (problem,) = find_problems(Schedule.from_csv(file))
    assert fail(command, file) == (
        1,
        f"penstock: {file} is not a valid schedule: {problem}",
    )


@pytest.mark.parametrize("command", ["show", "check", "simulate", "compare", "explain"])
def test_commands_exit_with_two_for_an_unreadable_file(tmp_path: Path, command: str) -> None:
    file = write(tmp_path, "0F0,1F0garbage\n")
    with pytest.raises(ParseError) as error:
        Schedule.from_csv(file)
    assert fail(command, file) == (2, f"penstock: {error.value}")
    missing = tmp_path / "missing.csv"
    assert fail(command, missing) == (2, f"penstock: {missing}: no such file or directory")


def test_a_file_of_another_ending_is_not_taken_for_a_family(tmp_path: Path) -> None:
    # "unknown schedule" and a list of families did not say what is wrong with the file.
    file = tmp_path / "order.txt"
    file.write_text("0F0,0B0\n")
    reason = "must end in .csv, .json, .json.gz or .flight (got 'order.txt')"
    assert fail("show", file) == (2, f"penstock: the name of a file {reason}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("show", "1F1B", "--forward", "nan"),
            "penstock: forward must be from 0 to 1e+100 (got nan)",
        ),
        (
            ("simulate", "1F1B", "--forward", "1,2,3"),
            "penstock: forward has 3 values, but the schedule has 4 stages; "
            "give one number, or one per stage",
        ),
        (
            ("show", "1F1B", "--stages-per-rank", "2"),
            "penstock: 1F1B has 1 stage per rank (stages_per_rank: 2); "
            "use stages_per_rank=1, or Interleaved1F1B for more",
        ),
        (
            ("explain", "ZBX"),
            "penstock: unknown schedule 'ZBX'; did you mean ZBV? known are ForwardOnly, GPipe, "
            "1F1B, Interleaved1F1B, LoopedBFS, ZB-H1, ZB-H2, InterleavedZeroBubble, ZBV, V-Half, "
            "V-Min, DualPipeV, DualPipe",
        ),
    ],
)
def test_unusable_input_exits_with_two(arguments: tuple[str, ...], message: str) -> None:
    assert fail(*arguments) == (2, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show",), "Error: Missing argument 'SCHEDULE'."),
        (("compare",), "Error: Missing argument 'SCHEDULE...'."),
        (
            ("show", "1F1B", "--ranks", "0"),
            "Error: Invalid value for '-r' / '--ranks': 0 is not in the range x>=1.",
        ),
        (
            ("show", "1F1B", "--forward", "fast"),
            "Error: Invalid value for '--forward': 'fast' must be a number, "
            "or numbers separated by commas",
        ),
        (
            ("check", "1F1B", "--channels", "none"),
            "Error: Invalid value for '--channels': 'none' is not one of 'directed', 'shared'.",
        ),
        (("draw",), "Error: No such command 'draw'."),
    ],
)
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == message


def test_simulate_prints_a_line_per_rank() -> None:
    result = run("simulate", "1F1B", *SIZE, "--transfer", "0.5", "--activation-bytes", "2")
    assert result.exit_code == 0
    table = [re.split(r" {2,}", line.strip()) for line in result.output.splitlines()]
    assert [row[:4] for row in table if row[0] in ("0", "1")] == [
        ["0", "0", "6", "4"],
        ["1", "1", "6", "4"],
    ]


def test_costs_come_from_a_file_and_options_override_it(tmp_path: Path) -> None:
    file = write(tmp_path, "forward = [1, 2]\ntransfer = 1\n", "costs.toml")
    given = json.loads(run("simulate", "1F1B", *SIZE, "--costs", file, "--json").output)
    same = run("simulate", "1F1B", *SIZE, "--forward", "1,2", "--transfer", "1", "--json")
    assert given == json.loads(same.output)
    less = run("simulate", "1F1B", *SIZE, "--costs", file, "--transfer", "0", "--json")
    assert json.loads(less.output)["end_time"] == given["end_time"] - 2


def test_compare_prints_ratios_to_the_first() -> None:
    result = run("compare", "1F1B", "ZBV", *SIZE)
    assert result.exit_code == 0
    assert result.output == (
        "schedule  end time s  ratio  bubble  peak microbatches\n"
        "1F1B               9  1.000  33.3 %                  2\n"
        "ZBV                7  0.778  14.3 %                  2\n"
    )


def test_compare_shows_the_period_if_nothing_waits_between_steps() -> None:
    result = run("compare", "1F1B", "ZBV", *SIZE, "--boundary", "nothing")
    assert result.output == (
        "schedule  period s  ratio  bubble  peak microbatches\n"
        "1F1B             9  1.000  33.3 %                  2\n"
        "ZBV              7  0.778  14.3 %                  2\n"
    )
    found = run("simulate", "ZBV", *SIZE, "--boundary", "nothing", "--json")
    assert json.loads(found.output)["step_seconds"] == 7


def test_compare_draws_each_schedule_on_request() -> None:
    lines = run("compare", "1F1B", "ZBV", *SIZE, "--draw").output.splitlines()
    assert [line for line in lines if line.endswith(":")] == ["1F1B:", "ZBV:"]
    assert sum(line.startswith("rank ") for line in lines) == 4


def test_explain_prints_the_critical_path_and_idle_time() -> None:
    lines = run("explain", "1F1B", *SIZE, "--transfer", "0.5").output.splitlines()
    assert lines[0] == "The last rank ends after 10 s; ranks are idle for 40.0 % of that."
    assert "0F0 > 1F0 > 1B0 > 1F1 > 1B1 > 0B1" in lines
    assert "seconds by kind: F 3, B 6, transfer 1" in lines
    assert "seconds of all ranks, waiting for: B 3, transfer 1" in lines


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (("list",), {"1F1B", "ZBV", "DualPipe"}),
        (("show", "1F1B", *SIZE), {"name", "orders", "end_time", "per_rank"}),
        (("show", "ZBV", *SIZE, "--lower"), {"name", "orders", "end_time", "per_rank"}),
        (("check", "1F1B", *SIZE), {"schedule", "is_fine", "problems"}),
        (("simulate", "1F1B", *SIZE), {"end_time", "bubble_rate", "peak_bytes", "per_rank"}),
        (("compare", "1F1B", "ZBV", *SIZE), {"1F1B", "ZBV"}),
        (("explain", "1F1B", *SIZE), {"critical_path", "gaps", "savings", "end_time"}),
    ],
)
def test_every_command_prints_json(arguments: tuple[str, ...], keys: set[str]) -> None:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert keys <= set(json.loads(result.output))


def test_json_contains_the_whole_schedule() -> None:
    shown = json.loads(run("show", "1F1B", *SIZE, "--json").output)
    assert shown["rank_of_stage"] == [0, 1]
    expected = read_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert Schedule.from_orders(shown["orders"]) == expected
    assert shown["per_rank"]["idle_seconds"] == [3, 3]


@pytest.mark.parametrize(
    "command", ["list", "show", "check", "simulate", "compare", "explain", "verify", "demo"]
)
def test_help_shows_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"penstock {command}" in result.output.partition("Example")[2]


def test_list_names_every_family() -> None:
    names = {line.split(" ")[0] for line in run("list").output.splitlines()}
    assert {"ForwardOnly", "GPipe", "1F1B", "ZB-H1", "ZBV", "V-Min", "DualPipe"} <= names


def test_show_loads_neither_torch_nor_the_compiler() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "penstock", "show", "1F1B"]
    result = subprocess.run(
        [*command, "--ranks", "4", "--microbatches", "8"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout.startswith("rank 0  F0F1F2F3....")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert {"penstock.cli.commands", "numpy"} <= loaded
    assert loaded & {"torch", "numba", "matplotlib"} == set()


def test_process_exits_with_the_exit_code(tmp_path: Path) -> None:
    codes = [
        subprocess.run(
            [sys.executable, "-m", "penstock", "check", write(tmp_path, text)],
            capture_output=True,
            check=False,
        ).returncode
        for text in (FINE, STUCK, "garbage")
    ]
    assert codes == [0, 1, 2]
