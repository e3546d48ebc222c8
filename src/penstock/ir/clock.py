"""Run every rank's list strictly in order: when each row starts, or which ranks are stuck.

One loop serves the simulator, lowering and the deadlock search. Small schedules run it on lists,
large ones compiled; see `ir/loops`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.graph import Graph
from penstock.ir.loops import can_compile, compile_loop, filled
from penstock.ir.rows import Floats, Rows

__all__ = ["Run", "expect_rows", "find_cycle", "run_in_order"]

# Below this many rows, loading the compiled loop takes longer than running the plain one.
_ROWS_WORTH_LOADING = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """When each row starts (NaN if never), and where ranks are stuck.

    A rank that is stuck has the row that it is at and the row that it waits for; others have -1.
    """

    start: Floats
    stuck_at: NDArray[np.int64]
    waits_for: NDArray[np.int64]

    @property
    def is_finished(self) -> bool:
        """Whether every rank got to the end of its list."""
        return bool((self.stuck_at < 0).all())


def run_in_order(
    rows: Rows,
    graph: Graph,
    *,
    duration: Floats,
    busy: Floats,
    lag: Floats,
    begin: Floats | None = None,
) -> Run:
    """Start each row at the later of its rank's clock and its inputs' arrival.

    An input arrives when its row ends (start plus `duration`) plus the `lag` of that need. A row
    occupies its rank for `busy` seconds. Joined rows start together, when all their inputs are
    there; each has the duration of the whole group. `begin` is what each rank's clock shows at
    first; without it, all begin at 0.
    """
    # Ranks fit into 32 bits, and half the memory makes the compiled loop faster.
    waiter = np.full(len(rows), -1, dtype=np.int32)
    clock = np.zeros(rows.num_ranks) if begin is None else begin.astype(np.float64)
    needs = (graph.first, graph.need, lag)
    columns = (rows.first, rows.joined, *needs, duration, busy, waiter, clock)
    if _is_worth_compiling(len(rows)):
        return Run(*_compiled_loop()(_Columns(*columns)))
    return Run(*map(np.array, _loop(_Columns(*(column.tolist() for column in columns)))))


def expect_rows(num_rows: int) -> None:
    """Load the compiled loop if that pays for runs with this many rows in all."""
    if _is_worth_compiling(num_rows):
        _compiled_loop()


def _is_worth_compiling(num_rows: int) -> bool:
    if _compiled_loop.cache_info().currsize:
        return True
    return num_rows >= _ROWS_WORTH_LOADING and can_compile()


@cache
def _compiled_loop() -> Callable[..., Any]:
    return compile_loop(_loop)


class _Columns(NamedTuple):
    """A schedule with its graph and prices; see `Rows`, `Graph` and `run_in_order`."""

    first: Any
    joined: Any
    first_need: Any
    need: Any
    lag: Any
    duration: Any
    busy: Any
    waiter: Any
    clock: Any


def _loop(columns: _Columns) -> tuple[Any, Any, Any]:
    """Run each rank until it must wait; the rank that starts the awaited row wakes it.

    Return the columns of a `Run`. `waiter[row]` is the rank that came last to wait for a row,
    `next_waiter` the one before it.
    """
    first, joined, first_need, need, lag, duration, busy, waiter, clock = columns
    num_ranks, num_rows = len(first) - 1, len(joined)
    start = filled(num_rows, nan)
    stuck_at, waits_for = filled(num_ranks, -1), filled(num_ranks, -1)
    position, next_waiter, ready = (
        filled(num_ranks, 0),
        filled(num_ranks, -1),
        filled(num_ranks, 0),
    )
    for rank in range(num_ranks):
        position[rank] = first[rank]
        ready[rank] = num_ranks - 1 - rank
    num_ready = num_ranks
    while num_ready > 0:
        num_ready -= 1
        rank = ready[num_ready]
        row = position[rank]
        last = first[rank + 1]
        missing = -1
        while row < last:
            begin = clock[rank]
            end = row
            while missing < 0 and end < last and (end == row or joined[end]):
                for slot in range(first_need[end], first_need[end + 1]):
                    other = need[slot]
                    if start[other] != start[other]:
                        missing = other
                        break
                    begin = max(begin, start[other] + duration[other] + lag[slot])
                end += 1
            if missing >= 0:
                break
            for member in range(row, end):
                start[member] = begin
                woken = waiter[member]
                while woken >= 0:
                    ready[num_ready] = woken
                    num_ready += 1
                    stuck_at[woken] = -1
                    waits_for[woken] = -1
                    woken = next_waiter[woken]
            clock[rank] = begin + busy[row]
            row = end
        position[rank] = row
        if missing >= 0:
            stuck_at[rank] = row
            waits_for[rank] = missing
            next_waiter[rank] = waiter[missing]
            waiter[missing] = rank
    return start, stuck_at, waits_for


def find_cycle(rows: Rows, run: Run) -> list[int]:
    """Return ranks of a stuck run, each waiting for the next and the last for the first."""
    rank_of_row = rows.rank_of_row()
    rank = int(np.flatnonzero(run.stuck_at >= 0)[0])
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = int(rank_of_row[run.waits_for[rank]])
    return seen[seen.index(rank) :]
