"""What is running, in a terminal only."""

from io import StringIO
from time import monotonic

from rich.console import Console

from penstock.cli.waiting.busy import show_busy


def test_log_stays_empty() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured, show_busy(console, "solving"):
        pass
    assert captured.get() == ""


def test_terminal_shows_what_runs_only_if_it_takes_a_moment() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with show_busy(console, "building", patience=60):
        pass
    assert "building" not in file.getvalue()
    deadline = monotonic() + 20
    with show_busy(console, "building", patience=0):
        while "building" not in file.getvalue():
            assert monotonic() < deadline
