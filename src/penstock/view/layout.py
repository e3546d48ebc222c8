"""The position of every bar of a picture: ranks down, time across.

-0.5 +-------------------+      one lane per rank, centred on the rank's number;
   0 | rank 0's lane     |      the members of an overlap share its height,
     |                   |      forward above, backward below; copies to the host are
 0.5 +-------------------+      a strip above the lane, and those back one below it
   1 | rank 1's lane     |
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Bools, Floats
from penstock.sim.timeline import Timeline

__all__ = ["BUSY_KINDS", "LANE_HEIGHT", "STRIPS", "Rectangles", "rectangles"]

# The share of a lane that its bars fill; the rest separates neighbouring ranks.
LANE_HEIGHT = 0.84

# What is drawn beside the lane, since it runs beside compute: its top and bottom from the centre.
STRIPS = {Kind.OFFLOAD: (-0.5, -LANE_HEIGHT / 2), Kind.RELOAD: (LANE_HEIGHT / 2, 0.5)}

# A receive waits in the background; every other kind keeps its rank busy.
BUSY_KINDS = tuple(kind for kind in Kind if kind not in (Kind.RECV_F, Kind.RECV_B))


@dataclass(frozen=True, slots=True, eq=False)
class Rectangles:
    """The bars of a picture as columns, in the order of the timeline's rows.

    `row` is the row of the timeline; `local_stage` is the index of its stage among the stages of
    its rank. `left` and `right` are start and end; `top` and `bottom` count lanes downwards.
    """

    row: NDArray[np.int64]
    rank: NDArray[np.int32]
    kind: NDArray[np.int8]
    local_stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    left: Floats
    right: Floats
    top: Floats
    bottom: Floats
    is_overlapped: Bools

    def __len__(self) -> int:
        """Return the number of bars."""
        return len(self.row)

    @property
    def num_local_stages(self) -> int:
        """The largest number of stages on one rank that have bars."""
        return int(self.local_stage.max(initial=0)) + 1

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that occur among the bars."""
        return [Kind(code) for code in np.unique(self.kind).tolist()]

    @property
    def begin(self) -> float:
        """The start of the first bar."""
        return float(self.left.min()) if len(self) else 0.0

    @property
    def seconds(self) -> float:
        """The time from the start of the first bar to the end of the last; never zero."""
        return float(self.right.max()) - self.begin if len(self) else 1.0


def rectangles(timeline: Timeline, kinds: Collection[Kind] = BUSY_KINDS) -> Rectangles:
    """Return the bars of a timeline: one per row of these kinds, if it takes any time.

    Of a collective that runs beside compute, the bar is what compute leaves free.
    """
    rows = timeline.schedule.rows
    start, end = _uncovered(timeline)
    rank = rows.rank_of_row()
    number, size = _number_in_group(rows.joined, rows.kind)
    top, bottom = (LANE_HEIGHT * (part / size - 0.5) for part in (number, number + 1))
    for kind, edges in STRIPS.items():
        for column, edge in zip((top, bottom), edges, strict=True):
            column[rows.is_kind(kind)] = edge
    drawn = np.flatnonzero(rows.is_kind(*kinds) & (end > start))
    return Rectangles(
        row=drawn,
        rank=rank[drawn],
        kind=rows.kind[drawn],
        local_stage=_local_stages(timeline.schedule.placement)[rows.stage[drawn]],
        microbatch=rows.microbatch[drawn],
        left=start[drawn],
        right=end[drawn],
        top=(rank + top)[drawn],
        bottom=(rank + bottom)[drawn],
        is_overlapped=(size > 1)[drawn],
    )


def _uncovered(timeline: Timeline) -> tuple[Floats, Floats]:
    """Return starts and ends, of rows beside their rank without what its other work covers.

    Where some is free both before and after that work, the longer part is returned.
    """
    start, end, rows = timeline.start.copy(), timeline.end.copy(), timeline.schedule.rows
    if timeline.program is None:
        return start, end
    rank = rows.rank_of_row()
    is_beside = timeline.program.is_beside & ~rows.is_kind(*STRIPS)
    is_work = rows.is_kind(*BUSY_KINDS) & ~timeline.program.is_beside & (end > start)
    for row in np.flatnonzero(is_beside).tolist():
        meets = is_work & (rank == rank[row]) & (timeline.start < end[row])
        meets &= timeline.end > start[row]
        if meets.any():
            first, last = float(timeline.start[meets].min()), float(timeline.end[meets].max())
            if first - start[row] > end[row] - last:
                end[row] = first
            else:
                start[row] = min(last, end[row])
    return start, end


def _number_in_group(
    joined: Bools, kind: NDArray[np.int8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of every row in its overlap, ordered by kind, and the overlap's size."""
    group = np.cumsum(~joined) - 1
    size = np.bincount(group)
    order = np.lexsort((kind, group))
    number = np.empty(len(joined), dtype=np.int64)
    number[order] = np.arange(len(joined)) - np.repeat(np.cumsum(size) - size, size)
    return number, size[group]


def _local_stages(placement: Placement) -> NDArray[np.int32]:
    """Return the index of every stage among the stages of its rank."""
    held = [0] * placement.num_ranks
    indices = []
    for rank in placement.rank_of_stage:
        indices.append(held[rank])
        held[rank] += 1
    return np.array(indices, dtype=np.int32)
