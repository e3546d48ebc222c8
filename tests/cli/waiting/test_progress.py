"""Progress of long work, in a log and in a terminal."""

import re
from io import StringIO

import pytest
from rich.console import Console

from penstock.cli.waiting.progress import (
    show_rounds,
    show_solving,
    show_training,
    sparkline,
)
from penstock.costs import Costs
from penstock.planner.planning import plan

pytest.importorskip("torch")

from penstock.tools.demo.task import Task
from penstock.tools.demo.training import HeldBytes, TrainedStep


def test_sparkline_has_a_bar_per_value_up_to_its_width() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert [len(sparkline(range(count), width=10)) for count in (1, 9, 10, 11, 99)] == (
        [1, 9, 10, 10, 10]
    )


def test_log_gets_occasional_lines() -> None:
    console = Console(width=80, force_terminal=False)
    task = Task(ranks=2, steps=12)
    with console.capture() as captured, show_training(console, "pipeline", task) as display:
        display.show(HeldBytes(1, 3 * 2**20))
        display.show(HeldBytes(0, 2 * 2**20))
        for number in range(1, 13):
            display.show(TrainedStep(number, loss=4 / number, seconds=0.5, bubble=0.125))
    assert captured.get().splitlines() == [
        "pipeline memory: rank 0 2 MiB, rank 1 3 MiB",
        *(
            f"pipeline step {number}/12: loss {4 / number:.4f}, 8,192 tokens/s, bubble 12.5 %"
            for number in (1, 2, 4, 6, 8, 10, 12)
        ),
    ]
    assert [step.number for step in display.steps] == list(range(1, 13))


def test_terminal_shows_the_numbers_of_the_last_step() -> None:
    console = Console(width=80, force_terminal=True, color_system=None)
    task = Task(ranks=1, steps=2)
    with console.capture() as captured, show_training(console, "pipeline", task) as display:
        display.show(HeldBytes(0, 2**20))
        for number in (1, 2):
            display.show(TrainedStep(number, loss=5.0 - number, seconds=0.5, bubble=0.25))
    plain = re.sub(r"\x1b\[[?\d;]*\w", "", captured.get())
    lines = [line.split() for line in plain.splitlines() if line.strip()][-5:]
    assert (lines[0][0], lines[0][2]) == ("pipeline", "2/2")
    assert lines[1:] == [
        ["loss", "█▁", "3.0000"],
        ["speed", "8,192", "tokens/s"],
        ["bubble", "25.0", "%"],
        ["memory", "rank", "0", "1", "MiB"],
    ]


def test_log_stays_empty_while_waiting() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured, show_rounds(console, 3) as report:
        report(1)
    assert captured.get() == ""


def test_log_stays_empty_while_solving() -> None:
    console = Console(file=StringIO())
    with show_solving(console, 1.0) as progress:
        assert progress is None
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == ""


def test_terminal_shows_the_best_plan_so_far() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with show_solving(console, 1.0) as progress:
        found = plan(Costs(), ranks=2, microbatches=3, seconds=0.2, progress=progress)
    assert f"{found.seconds:g} s, 0.0 % above the bound" in file.getvalue()
