"""Orders as CSV files: one row per rank, one cell per action, an empty cell is an idle slot."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.atomic_files import write_atomically
from penstock.dropin.names.actions import ActionTextError, _Action
from penstock.dropin.names.lists import Order
from penstock.errors import ParseError
from penstock.untrusted import read_text

__all__ = ["read_order", "write_order"]


def write_order(order: Mapping[int, Sequence[_Action | None]], filename: Path | str) -> None:
    """Write an order, the ranks in the order of the mapping."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(order.values())
    write_atomically(filename, text.getvalue())


def read_order(filename: Path | str) -> Order:
    """Read an order, one row per rank from rank 0; empty lines at the end are ignored."""
    file = Path(filename)
    try:
        table = list(csv.reader(io.StringIO(read_text(file), newline="")))
        while table and not table[-1]:
            table.pop()
        return {
            rank: [_read_cell(cell, rank, at) for at, cell in enumerate(row)]
            for rank, row in enumerate(table)
        }
    except (ParseError, csv.Error) as error:
        raise ActionTextError(f"{file}: {error}") from error


def _read_cell(cell: str, rank: int, position: int) -> _Action | None:
    try:
        return _Action.from_str(cell)
    except ActionTextError as error:
        raise ActionTextError(f"rank {rank}, cell {position}: {error}") from error
