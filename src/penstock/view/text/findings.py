"""The plans found by a search, as a table for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.planner.search.findings import Findings

__all__ = ["findings_view"]

# What has a column; with the rest, names would be cut off in 80 columns.
_NAMES = ("placement", "order")


def findings_view(findings: Findings) -> RenderableType:
    """List the plans, best first, with their other choices below, and why the others lost."""
    rows = [dict(zip(findings.headings, row, strict=True)) for row in findings.rows]
    numbers = findings.headings[: findings.headings.index("peak") + 1]
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in _NAMES:
        table.add_column(heading, overflow="fold")
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *(row[heading] for heading in (*numbers, *_NAMES)))
    lines = [
        f"{number}: {comparison}; microbatches {row['microbatches']}, layers {row['layers']}, "
        f"checkpointed {row['checkpointed']}"
        for number, (row, comparison) in enumerate(zip(rows, findings.comparisons, strict=True), 1)
    ]
    return Group(table, Text(), Text("\n".join([*lines, *findings.remarks])))
