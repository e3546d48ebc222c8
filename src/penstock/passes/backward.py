"""Whole and split backwards: merge each I with a W right after it, or split every B."""

from dataclasses import replace

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.rows import Bools, Rows
from penstock.ir.schedule import Schedule

__all__ = ["find_pairs", "merge_backward", "merge_pairs", "split_backward"]


def merge_backward(schedule: Schedule) -> Schedule:
    """Merge each I with the W of the same stage and microbatch right after it into one B.

    >>> print(merge_backward(Schedule.from_orders([["0F0", "0I0", "0W0"]])))
       rank 0
    0  0F0
    1  0B0
    """
    return merge_pairs(schedule, find_pairs(schedule.rows))


def find_pairs(rows: Rows) -> Bools:
    """Return, for every row, whether it is an I with the W of its microbatch right after it.

    A half that is part of an overlap stays there, so it is not in a pair.
    """
    alone = ~rows.in_overlap()
    is_pair = rows.is_kind(Kind.BACKWARD_INPUT) & alone
    follows = rows.is_kind(Kind.BACKWARD_WEIGHT) & alone
    is_same = (rows.stage[:-1] == rows.stage[1:]) & (rows.microbatch[:-1] == rows.microbatch[1:])
    is_pair[:-1] &= follows[1:] & is_same
    is_pair[-1:] = False
    return is_pair


def merge_pairs(schedule: Schedule, is_pair: Bools) -> Schedule:
    """Turn each I that is marked into a B, and drop the W in the row after it."""
    rows = schedule.rows
    kind = np.where(is_pair, np.int8(Kind.FULL_BACKWARD), rows.kind)
    is_second = np.concatenate(([False], is_pair[:-1]))
    return replace(schedule, rows=replace(rows, kind=kind).keep(~is_second))


def split_backward(schedule: Schedule) -> Schedule:
    """Split every B into I and W; an overlapped B stays whole.

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
