"""The plans found by a search, as a table for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.planner.search.findings import Findings

__all__ = ["findings_view"]

# The number of columns with numbers, which come first: seconds, bubble, gap and bytes.
_NUMBERS = 4


def findings_view(findings: Findings) -> RenderableType:
    """List the plans, best first, with remarks below on why the others lost."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    for place, heading in enumerate(findings.headings[:-1]):
        table.add_column(heading, justify="right" if place < _NUMBERS else "left")
    for number, row in enumerate(findings.rows, 1):
        table.add_row(str(number), *row[:-1])
    lines = [
        f"{number}: {comparison}" for number, comparison in enumerate(findings.comparisons, 1)
    ]
    return Group(table, Text(), Text("\n".join([*lines, *findings.remarks])))
