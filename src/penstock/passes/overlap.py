"""Overlap: run a forward and the backward after it together where that is possible."""

from dataclasses import replace

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.clock import find_cycle, run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.rows import Bools
from penstock.ir.schedule import Schedule

__all__ = ["join_where_possible", "overlap_forward_backward"]


def overlap_forward_backward(schedule: Schedule) -> Schedule:
    """Join each forward with the full backward of another microbatch right after it.

    Pairs in which one half waits for the other, directly or through other ranks, stay apart.

    >>> orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    >>> print(overlap_forward_backward(Schedule.from_orders(orders)))
       rank 0                rank 1
    0  0F0                   1F0
    1  (0F1;0B0)OVERLAP_F_B  1B0
    2  0B1                   1F1
    3                        1B1
    """
    return join_where_possible(schedule, _candidates(schedule))


def join_where_possible(schedule: Schedule, wanted: Bools) -> Schedule:
    """Join rows with the row before them where `wanted` says so, but for pairs that would wait.

    Pairs in which one half waits for the other, directly or through other ranks, stay apart.
    """
    joined = wanted
    while True:
        attempt = replace(schedule, rows=replace(schedule.rows, joined=joined))
        graph = build_graph(attempt)
        ones = np.ones(len(joined))
        lag = np.zeros(len(graph.need))
        run = run_in_order(attempt.rows, graph, duration=ones, busy=ones, lag=lag)
        if run.is_finished:
            return attempt
        # Each pair in a cycle waits, through the others, for itself: take those apart again.
        stuck = run.stuck_at[find_cycle(attempt.rows, run)]
        pairs = np.intersect1d(stuck + 1, np.flatnonzero(joined & ~schedule.rows.joined))
        if not pairs.size:
            raise ScheduleError("the order never finishes, so nothing can overlap; check it first")
        joined = joined.copy()
        joined[pairs] = False


def _candidates(schedule: Schedule) -> Bools:
    rows = schedule.rows
    alone = ~rows.in_overlap()
    is_first = (rows.kind == Kind.FORWARD) & alone
    is_second = (rows.kind == Kind.FULL_BACKWARD) & alone
    same_rank = np.ones(len(rows), dtype=np.bool_)
    same_rank[rows.first[:-1]] = False
    joined = rows.joined.copy()
    other = rows.microbatch[:-1] != rows.microbatch[1:]
    joined[1:] |= is_first[:-1] & is_second[1:] & same_rank[1:] & other
    return joined
