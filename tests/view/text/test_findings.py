"""The findings of a search as a table, with the reasons below."""

from io import StringIO

from rich.console import Console

from penstock.view.text.findings import findings_view
from tests.planner.search.test_findings import make_findings


def test_reasons_are_listed_below_the_table() -> None:
    # In 80 columns, names of families and placements were cut off.
    console = Console(file=StringIO(), width=80)
    console.print(findings_view(make_findings()))
    assert isinstance(console.file, StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "   end time s  bubble     gap      peak  placement  order",
        "1        18.5   2.7 %   2.8 %  7.81 KiB  v          ZBV",
        "2          27  22.2 %  12.5 %  3.91 KiB  loop       1F1B",
        "",
        "1: fastest; microbatches 6 x 4, layers 2 2x3 2, checkpointed none",
        "2: slower by 45.9 %: recompute +16.2 %, imbalance +16.2 %, bubble +8.1 %,",
        "transfer +5.4 %; microbatches 6 x 4, layers 2x5, checkpointed 0",
        "proven to be slower, and not solved: 3",
        "over the limit, whatever the order: 1, such as",
        "  loop, microbatches of 8, checkpointed none: over the limit by 2,000 bytes on",
        "rank 1",
    ]
