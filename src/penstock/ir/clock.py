"""Runs every rank's list strictly in order and tells when each row starts, or who is stuck.

One loop serves the simulator, lowering and the deadlock search. It is written once, over plain
sequences: small schedules run it on lists, large ones compiled by numba where that is installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.graph import Graph
from penstock.ir.rows import Floats, Rows

__all__ = ["Run", "expect_rows", "find_cycle", "run_in_order"]

# Loading the compiled loop takes a good half second, once; below this many rows it does not pay.
_ROWS_WORTH_LOADING = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """When each row starts (NaN if never), and per rank the row that it is stuck at, or -1."""

    start: Floats
    stuck_at: NDArray[np.int64]
    waits_for: NDArray[np.int64]

    @property
    def is_finished(self) -> bool:
        """Whether every rank got to the end of its list."""
        return bool((self.stuck_at < 0).all())


def run_in_order(rows: Rows, graph: Graph, *, duration: Floats, busy: Floats, lag: Floats) -> Run:
    """Start each row at the later of its rank's clock and its inputs' arrival.

    An input arrives when its row ends (start plus `duration`) plus the `lag` of that need. A row
    keeps its rank for `busy` seconds. Joined rows start together, when all their inputs are in;
    each carries the duration of the whole group.
    """
    num_ranks, num_rows = rows.num_ranks, len(rows)
    inputs = (rows.first, rows.joined, graph.first, graph.need, lag, duration, busy)
    start = np.full(num_rows, np.nan)
    stuck_at = np.full(num_ranks, -1, dtype=np.int64)
    waits_for = np.full(num_ranks, -1, dtype=np.int64)
    if _is_worth_compiling(num_rows):
        waiter = np.full(num_rows, -1, dtype=np.int32)
        _compiled_loop()(*inputs, start, stuck_at, waits_for, waiter)
        return Run(start, stuck_at, waits_for)
    results = start.tolist(), stuck_at.tolist(), waits_for.tolist()
    arguments: list[Any] = [*(array.tolist() for array in inputs), *results, [-1] * num_rows]
    _loop(*arguments)
    return Run(*map(np.array, results))


def expect_rows(num_rows: int) -> None:
    """Get ready for runs of so many rows in all: load the compiled loop if that will pay."""
    if _is_worth_compiling(num_rows):
        _compiled_loop()


def _is_worth_compiling(num_rows: int) -> bool:
    if _compiled_loop.cache_info().currsize:
        return True
    return num_rows >= _ROWS_WORTH_LOADING and find_spec("numba") is not None


@cache
def _compiled_loop() -> Callable[..., None]:
    from numba import njit

    compiled: Callable[..., None] = njit(cache=True)(_loop)
    return compiled


def _loop(
    first: Any,
    joined: Any,
    first_need: Any,
    need: Any,
    lag: Any,
    duration: Any,
    busy: Any,
    start: Any,
    stuck_at: Any,
    waits_for: Any,
    waiter: Any,
) -> None:
    """Run each rank until it must wait; whoever starts the awaited row sets it going again.

    `waiter[row]` is the rank that came last to wait for a row, `next_waiter` the one before it.
    """
    num_ranks = len(first) - 1
    clock = [0.0] * num_ranks
    position = [0] * num_ranks
    next_waiter = [-1] * num_ranks
    ready = [0] * num_ranks
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


def find_cycle(rows: Rows, run: Run) -> list[int]:
    """The ranks of a cycle of waits in a run that did not finish, each waiting for the next."""
    rank_of_row = rows.rank_of_row()
    rank = int(np.flatnonzero(run.stuck_at >= 0)[0])
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = int(rank_of_row[run.waits_for[rank]])
    return seen[seen.index(rank) :]
