"""Problems that checks find, with their messages."""

from dataclasses import dataclass

from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.wording import WORDING

__all__ = ["Problem", "at_row"]

# The number of works that a message shows before and after the wrong one.
_NEIGHBOURS = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule: where, which action, and what is wrong with it."""

    rule: str
    rank: int
    action: str
    message: str
    position: int | None = None
    neighbourhood: str = ""

    def __str__(self) -> str:
        place = f"rank {self.rank}"
        if self.position is not None:
            place += f", position {self.position}"
        text = WORDING["problem"].format(
            place=place, action=self.action, message=self.message, rule=self.rule
        )
        return f"{text}\n{self.neighbourhood}" if self.neighbourhood else text


def at_row(schedule: Schedule, row: int, rule: str, message: str) -> Problem:
    """Return a problem with the action in this row."""
    rank, position = schedule.rows.position(row)
    action = str(schedule.rows.action(row))
    return Problem(rule, rank, action, message, position, _neighbourhood(schedule.rows, rank, row))


def _neighbourhood(rows: Rows, rank: int, row: int) -> str:
    """Return the rank's works around a row, with the one that holds it in brackets."""
    begin, end = int(rows.first[rank]), int(rows.first[rank + 1])
    while rows.joined[row] and row > begin:
        row -= 1
    # Twice as many rows as works, because most overlaps are pairs.
    low, high = max(begin, row - 2 * _NEIGHBOURS), min(end, row + 2 * _NEIGHBOURS + 2)
    while rows.joined[low] and low > begin:
        low -= 1
    before = list(map(str, rows.works(rank, low - begin, row - begin)))[-_NEIGHBOURS:]
    here, *after = map(str, rows.works(rank, row - begin, high - begin))
    parts = [*before, f"[{here}]", *after[:_NEIGHBOURS]]
    return f"  rank {rank}: {' '.join(parts)}"
