"""`penstock soak`: its output and exit codes. One test starts real processes."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from penstock.cli import main

pytest.importorskip("torch")

from penstock.cli.soak import show_summary
from penstock.tools.soak.soak import SoakProgress, SoakRequest, Summary
from penstock.tools.verify.reference import GradientError


def test_soak_without_a_failure_exits_with_zero() -> None:
    arguments = ["soak", "--steps", "12", "--ranks", "2", "--no-faults", "--seed", "1"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == (
        "passed; repeat: penstock soak --seed 1 --ranks 2 --no-faults --steps 12"
    )


def printed(summary: Summary) -> list[str]:
    file = io.StringIO()
    # As wide as a terminal usually is: numbers side by side lost their names there.
    console = Console(file=file, width=80, soft_wrap=True, highlight=False)
    show_summary(console, SoakRequest(seed=9, seconds=60.0), summary)
    return file.getvalue().splitlines()


PROGRESS = SoakProgress(
    12, 60, 30.0, 2, 3, 5, 7, 4, GradientError(1e-15, "dense.weight"), 250 * 2**20
)


def test_failure_is_printed_with_the_command_that_repeats_it() -> None:
    command = "penstock soak --seed 9 --ranks 4 --faults --case 12"
    lines = printed(Summary(PROGRESS, "case 12: [the loss] is off by 1.0e-03", command))
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[1:12]] == [
        ["cases", "12"],
        ["steps", "60"],
        ["steps/s", "2.0"],
        ["faults survived", "2"],
        ["with replicas", "3"],
        ["by order", "5"],
        ["restored", "7"],
        ["elastic restarts", "4"],
        ["worst gradient error", "1.0e-15"],
        ["largest process", "250 MiB"],
        ["time", "30 s"],
    ]
    assert lines[-3:] == [
        "failed: case 12: [the loss] is off by 1.0e-03",
        "seed: 9",
        f"repeat: {command}",
    ]


def test_success_is_printed_with_the_command_that_repeats_it() -> None:
    assert printed(Summary(PROGRESS))[-1] == (
        "passed; repeat: penstock soak --seed 9 --ranks 4 --faults --minutes 1"
    )


@pytest.mark.parametrize("second", [["--minutes", "1"], ["--case", "3"]])
def test_options_for_the_length_exclude_each_other(second: list[str]) -> None:
    result = CliRunner().invoke(main, ["soak", "--steps", "5", *second])
    assert result.exit_code == 2
    assert result.output == (
        "penstock: --minutes, --steps and --case exclude each other; give one of them\n"
    )
