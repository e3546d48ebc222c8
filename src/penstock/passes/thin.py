"""Fewer microbatches in the same order: the rest of a valid schedule is valid."""

from dataclasses import replace

import numpy as np

from penstock.errors import SizeError
from penstock.ir.schedule import Schedule

__all__ = ["thin_out"]


def thin_out(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the schedule without its last microbatches, for a smaller batch.

    >>> print(thin_out(Schedule.from_orders([["0F0", "0F1", "0B0", "0B1"]]), 1))
       rank 0
    0  0F0
    1  0B0
    """
    if not 1 <= microbatches <= schedule.microbatches:
        raise SizeError(
            f"microbatches must be from 1 to the schedule's {schedule.microbatches} "
            f"(got {microbatches}); build a schedule for that many"
        )
    rows = schedule.rows
    kept = rows.microbatch < microbatches
    # A stage without work, as a copy may be, needs no parameters and no reduction.
    kept &= np.isin(rows.stage, rows.stage[kept & rows.is_compute])
    group = rows.opening_row()[kept]
    joined = np.concatenate(([False], group[1:] == group[:-1]))
    thinned = replace(rows.keep(kept), joined=joined)
    return replace(schedule, rows=thinned, microbatches=microbatches)
