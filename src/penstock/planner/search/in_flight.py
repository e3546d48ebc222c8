"""The number of microbatches that a schedule keeps in flight in each stage."""

import numpy as np

from penstock.ir.schedule import Schedule

__all__ = ["count_in_flight"]


def count_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, per stage, the most microbatches held at once, each from its F to its B or W.

    The stages of a rank need not peak at the same time, so a rank holds at most the sum of its
    stages' numbers.

    >>> count_in_flight(Schedule.from_orders([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"]]))
    (2, 1)
    """
    change, stage = schedule.rows.held_change, schedule.rows.stage
    held = (np.cumsum(change[stage == s]) for s in range(schedule.num_stages))
    return tuple(int(column.max()) for column in held)
