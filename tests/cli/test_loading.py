"""What a command loads before it does anything."""

import subprocess
import sys

import pytest

# The solver, pages, and the readers of traces and flight records.
HEAVY = (
    "penstock.files.flight.waits",
    "penstock.files.trace.reading",
    "penstock.planner.order.solver",
    "penstock.view.html.page",
    "penstock.view.playground.page",
    "rich.progress",
)
CODE = f"import penstock.cli.%s, sys; print(*sorted({set(HEAVY)} & set(sys.modules)))"


@pytest.mark.parametrize("command", ["prices", "explain", "playground"])
def test_looking_at_schedules_loads_neither_solver_nor_pages_nor_readers(command: str) -> None:
    # The packages planner, view and files had loaded all that they hold, for one name of theirs;
    # `penstock compare` took a fifth longer than before names were loaded late.
    result = subprocess.run(
        [sys.executable, "-c", CODE % command], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
