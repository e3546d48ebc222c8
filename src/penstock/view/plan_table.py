"""What a search has found, as a table for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.planner.search.findings import Findings

__all__ = ["findings_view"]

# The columns that hold numbers.
_RIGHT = ("seconds", "bubble", "gap", "peak bytes")


def findings_view(findings: Findings) -> RenderableType:
    """The plans, best first; below why the others lost, and what else there was to choose."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    for heading in findings.headings[:-1]:
        table.add_column(heading, justify="right" if heading in _RIGHT else "left")
    for number, row in enumerate(findings.rows, 1):
        table.add_row(str(number), *row[:-1])
    verdicts = [f"{number}: {verdict}" for number, verdict in enumerate(findings.verdicts, 1)]
    return Group(table, Text(), Text("\n".join([*verdicts, *findings.remarks])))
