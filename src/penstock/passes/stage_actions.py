"""Rows for actions that belong to a stage as a whole, and where they may go."""

import numpy as np
from numpy.typing import NDArray

from penstock.ir.rows import ABSENT, Rows
from penstock.ir.schedule import Schedule

__all__ = ["end_of_work", "stage_rows"]


def end_of_work(rows: Rows, row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row after each given row, or after the overlap that it is part of."""
    opens = np.flatnonzero(~rows.joined)
    following = np.append(opens, len(rows))
    return following[np.searchsorted(opens, row, side="right")]


def stage_rows(schedule: Schedule, kind: NDArray[np.int8], stage: NDArray[np.int64]) -> Rows:
    """Return UNSHARD, RESHARD or REDUCE_GRAD rows for these stages, sorted by rank."""
    holder = np.array(schedule.placement.rank_of_stage)[stage]
    lengths = np.bincount(holder, minlength=schedule.num_ranks)
    nothing = np.full(len(stage), ABSENT, dtype=np.int32)
    return Rows(
        first=np.concatenate(([0], np.cumsum(lengths))),
        kind=kind,
        stage=stage.astype(np.int32),
        microbatch=nothing,
        peer=nothing.copy(),
        joined=np.zeros(len(stage), dtype=np.bool_),
    )
