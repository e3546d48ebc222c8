"""What becomes of what forwards save: recompute it, or offload it and reload it.

0F0 0F1 0F2 0B0 0B1 0B2

recompute    0F0 0F1 0F2 0RECOMPUTE0 0B0 0B1 0B2
offload      0F0 0F1 0OFFLOAD0 0F2 0RELOAD0 0B0 0B1 0B2
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArgumentError, ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.lookup import find_memory_rows, find_rows
from penstock.ir.rows import ABSENT, Rows, insert_rows
from penstock.ir.schedule import Schedule

__all__ = ["MemoryRows", "add_offload", "add_recompute", "insert_memory_rows"]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRows:
    """RECOMPUTE, OFFLOAD and RELOAD actions as columns, each with the row that it goes before."""

    kind: NDArray[np.int8]
    stage: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    before: NDArray[np.int64]


def add_recompute(
    schedule: Schedule, chosen: Collection[tuple[int, int]] | None = None
) -> Schedule:
    """Recompute what the forwards of chosen (stage, microbatch) pairs would save.

    Such a forward saves only its inputs, and a RECOMPUTE right before the backward runs it again.
    While a rank waits for a gradient it can recompute. Without `chosen`, it is all pairs.

    >>> schedule = Schedule.from_orders([["0F0", "0F1", "0B0", "0B1"]])
    >>> print(*add_recompute(schedule, [(0, 1)]).order(0))
    0F0 0F1 0B0 0RECOMPUTE1 0B1
    """
    stage, microbatch = _read_chosen(schedule, chosen)
    backward = find_rows(schedule).backward_input[stage, microbatch]
    before = schedule.rows.opening_row()[backward]
    kind = np.full(len(stage), Kind.RECOMPUTE, dtype=np.int8)
    return insert_memory_rows(schedule, MemoryRows(kind, stage, microbatch, before))


def add_offload(
    schedule: Schedule,
    chosen: Collection[tuple[int, int]] | None = None,
    *,
    behind: int = 1,
    ahead: int = 1,
) -> Schedule:
    """Offload what the forwards of chosen (stage, microbatch) pairs save, and reload it in time.

    A copy to the host begins when the forward ends, and OFFLOAD waits for it and frees the memory
    of the device: after `behind` more pieces of compute on its rank. RELOAD takes memory and
    begins the copy back, `ahead` pieces of compute before the backward. Without `chosen`, it is
    all pairs with more compute than that in between.

    >>> schedule = Schedule.from_orders([["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]])
    >>> print(*add_offload(schedule, [(0, 1)]).order(0))
    0F0 0F1 0F2 0OFFLOAD1 0RELOAD1 0B0 0B1 0B2
    """
    if behind < 0 or ahead < 0:
        raise ArgumentError(f"behind and ahead must be at least 0 (got {behind} and {ahead})")
    stage, microbatch = _read_chosen(schedule, chosen)
    rows, lookup = schedule.rows, find_rows(schedule)
    compute = np.flatnonzero(rows.is_compute & ~rows.joined)
    opens = rows.opening_row()
    forward = np.searchsorted(compute, opens[lookup.forward[stage, microbatch]])
    backward = np.searchsorted(compute, opens[lookup.backward_input[stage, microbatch]])
    if chosen is None:
        is_long = backward - forward > behind + ahead
        stage, microbatch = stage[is_long], microbatch[is_long]
        forward, backward = forward[is_long], backward[is_long]
    out = np.minimum(forward + 1 + behind, backward)
    back = np.maximum(backward - ahead, out)
    kinds = np.array([Kind.OFFLOAD, Kind.RELOAD], dtype=np.int8)
    new = MemoryRows(
        np.repeat(kinds, len(stage)),
        np.tile(stage, 2),
        np.tile(microbatch, 2),
        compute[np.concatenate((out, back))],
    )
    return insert_memory_rows(schedule, new)


def insert_memory_rows(schedule: Schedule, new: MemoryRows) -> Schedule:
    """Insert memory actions, each before a row of its rank; of one place, OFFLOAD comes first."""
    rank = np.array(schedule.placement.rank_of_stage)[new.stage]
    order = np.lexsort((new.kind != Kind.OFFLOAD, new.before, rank))
    lengths = np.bincount(rank, minlength=schedule.num_ranks)
    rows = Rows(
        first=np.concatenate(([0], np.cumsum(lengths))),
        kind=new.kind[order],
        stage=new.stage[order].astype(np.int32),
        microbatch=new.microbatch[order].astype(np.int32),
        peer=np.full(len(order), ABSENT, dtype=np.int32),
        joined=np.zeros(len(order), dtype=np.bool_),
    )
    return replace(schedule, rows=insert_rows(schedule.rows, new.before[order], rows))


def _read_chosen(
    schedule: Schedule, chosen: Collection[tuple[int, int]] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the chosen pairs as columns, if each of them may be recomputed or offloaded."""
    lookup = find_rows(schedule)
    is_whole = (lookup.forward != ABSENT) & (lookup.backward_input != ABSENT)
    for table in find_memory_rows(schedule).values():
        is_whole &= table == ABSENT
    if chosen is None:
        pairs = np.argwhere(is_whole)
        return pairs[:, 0], pairs[:, 1]
    for stage, microbatch in chosen:
        is_known = 0 <= stage < schedule.num_stages and 0 <= microbatch < schedule.microbatches
        if not is_known or not is_whole[stage, microbatch]:
            raise ScheduleError(
                f"stage {stage} must run microbatch {microbatch} forward and backward, and must "
                "not recompute or offload it yet; choose other pairs"
            )
    pairs = np.array(sorted(set(chosen)), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
