"""Progress of a solver: a bar in a terminal, nothing in a log."""

from io import StringIO

from rich.console import Console

from penstock.cli.solver_progress import show_solving
from penstock.costs import Costs
from penstock.planner.planning import plan


def test_log_stays_empty() -> None:
    console = Console(file=StringIO())
    with show_solving(console, 1.0) as progress:
        assert progress is None
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == ""


def test_terminal_shows_the_best_so_far() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with show_solving(console, 1.0) as progress:
        found = plan(Costs(), ranks=2, microbatches=3, seconds=0.2, progress=progress)
    assert f"{found.timeline.makespan:g}, 0.0% above the bound" in file.getvalue()
