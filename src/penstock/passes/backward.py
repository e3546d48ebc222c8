"""Whole and split backwards: merge I and W that stand side by side, or split every B."""

from dataclasses import replace

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule

__all__ = ["merge_backward", "split_backward"]


def merge_backward(schedule: Schedule) -> Schedule:
    """Make one B of an I and the W of the same stage and microbatch right after it.

    >>> print(merge_backward(Schedule.from_orders([["0F0", "0I0", "0W0"]])))
       rank 0
    0  0F0
    1  0B0
    """
    rows = schedule.rows
    is_pair = np.zeros(len(rows), dtype=np.bool_)
    is_pair[:-1] = (
        (rows.kind[:-1] == Kind.BACKWARD_INPUT)
        & (rows.kind[1:] == Kind.BACKWARD_WEIGHT)
        & (rows.stage[:-1] == rows.stage[1:])
        & (rows.microbatch[:-1] == rows.microbatch[1:])
    )
    # A half that is part of an overlap stays there; nothing beside it may slip inside.
    alone = ~rows.in_overlap()
    is_pair[:-1] &= alone[:-1] & alone[1:]
    kind = np.where(is_pair, np.int8(Kind.FULL_BACKWARD), rows.kind)
    is_second = np.concatenate(([False], is_pair[:-1]))
    return replace(schedule, rows=replace(rows, kind=kind).keep(~is_second))


def split_backward(schedule: Schedule) -> Schedule:
    """Make I and W of every B; an overlapped B stays whole, for its pair is one piece of work.

    >>> print(split_backward(Schedule.from_orders([["0F0", "0B0"]])))
       rank 0
    0  0F0
    1  0I0
    2  0W0
    """
    rows = schedule.rows
    is_whole = (rows.kind == Kind.FULL_BACKWARD) & ~rows.in_overlap()
    times = np.where(is_whole, 2, 1)
    begin = np.concatenate(([0], np.cumsum(times)))
    doubled = rows.take(np.repeat(np.arange(len(rows)), times), begin[rows.first])
    kind = doubled.kind.copy()
    kind[begin[:-1][is_whole]] = Kind.BACKWARD_INPUT
    kind[begin[:-1][is_whole] + 1] = Kind.BACKWARD_WEIGHT
    return replace(schedule, rows=replace(doubled, kind=kind))
