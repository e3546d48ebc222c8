"""What is seen of work that goes on, in a log and in a terminal."""

import re

import pytest
from rich.console import Console

from penstock.cli.progress import show_busy, show_rounds, show_training, sparkline

pytest.importorskip("torch")

from penstock.tools.demo.task import Task
from penstock.tools.demo.training import HeldBytes, TrainedStep


def test_sparkline_has_a_bar_per_value_or_is_as_wide_as_asked() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert [len(sparkline(range(count), width=10)) for count in (1, 9, 10, 11, 99)] == (
        [1, 9, 10, 10, 10]
    )


def test_log_gets_a_line_now_and_then() -> None:
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


def test_terminal_gets_figures_that_stay() -> None:
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


def test_waiting_is_silent_in_a_log() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        with show_busy(console, "solving"):
            pass
        with show_rounds(console, 3) as tell:
            tell(1)
    assert captured.get() == ""
