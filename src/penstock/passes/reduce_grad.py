"""Gradient reduction: once per stage, right after its last backward."""

from dataclasses import replace

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.rows import ABSENT, insert_rows
from penstock.ir.schedule import Schedule
from penstock.passes.stage_actions import end_of_work, stage_rows

__all__ = ["add_reduce_grad"]


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """Put REDUCE_GRAD of each stage after the backward that completes its gradients.

    >>> print(*add_reduce_grad(Schedule.from_orders([["0F0", "0F1", "0B0", "0B1"]])).order(0))
    0F0 0F1 0B0 0B1 0REDUCE_GRAD
    """
    rows = schedule.rows
    backwards = np.flatnonzero(rows.is_kind(Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT))
    last = np.full(schedule.num_stages, ABSENT, dtype=np.int64)
    # Later rows overwrite earlier ones, so the last backward of each stage stays.
    last[rows.stage[backwards]] = backwards
    stages = np.flatnonzero(last != ABSENT)
    stages = stages[np.argsort(last[stages])]
    after = end_of_work(rows, last[stages])
    kind = np.full(len(stages), Kind.REDUCE_GRAD, dtype=np.int8)
    new = stage_rows(schedule, kind, stages)
    return replace(schedule, rows=insert_rows(rows, after, new))
