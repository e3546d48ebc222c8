"""Threads of a trace: compute and communication of every rank, in as many lanes as needed.

A viewer treats overlapping slices of one thread as nested calls. Actions that really run at the
same time, such as two waiting receives, therefore go into separate lanes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.sim.timeline import Timeline

__all__ = ["Lane", "TraceLanes", "find_lanes"]

_STREAMS = ("compute", "communication", "copies to the host", "copies back")


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread of a trace: its rank, its number among all threads (from 1), and its name."""

    rank: int
    number: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class TraceLanes:
    """The threads, the thread number of every row, and the rows ordered by rank and time."""

    lanes: tuple[Lane, ...]
    of_row: NDArray[np.int64]
    rows_by_time: NDArray[np.int64]


def find_lanes(timeline: Timeline) -> TraceLanes:
    """Assign every row to a thread of its rank on which no two rows overlap."""
    rows = timeline.schedule.rows
    rank = rows.rank_of_row()
    is_compute, is_out = rows.is_compute | rows.is_kind(Kind.RECOMPUTE), rows.is_kind(Kind.OFFLOAD)
    is_back = rows.is_kind(Kind.RELOAD)
    streams = (is_compute, ~(is_compute | is_out | is_back), is_out, is_back)
    order = np.lexsort((timeline.end, timeline.start, rank))
    of_row = np.zeros(len(rows), dtype=np.int64)
    lanes: list[Lane] = []
    for number in range(rows.num_ranks):
        for stream, is_member in zip(_STREAMS, streams, strict=True):
            members = order[(rank[order] == number) & is_member[order]]
            found = list(_choose(timeline.start[members].tolist(), timeline.end[members].tolist()))
            of_row[members] = np.array(found, dtype=np.int64) + len(lanes) + 1
            for lane in range(max(found, default=-1) + 1):
                name = stream if lane == 0 else f"{stream} {lane + 1}"
                lanes.append(Lane(number, len(lanes) + 1, name))
    return TraceLanes(tuple(lanes), of_row, order)


def _choose(starts: list[float], ends: list[float]) -> Iterator[int]:
    """Yield, for every slice in order of start and end, the first lane that is free."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    count = 0
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if not free:
            free, count = [count], count + 1
        lane = heappop(free)
        heappush(busy, (end, lane))
        yield lane
