"""A timeline as a grid of cells: one line per rank, every column an equal slice of time.

A cell shows the action that takes most of its time. Its two halves differ where a pair overlaps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.ir.rows import ABSENT, Floats
from penstock.sim.timeline import Timeline
from penstock.view.layout import Rectangles, rectangles

__all__ = ["Grid", "WideBar", "fill_grid", "wide_bars"]

_MIN_COLUMNS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The codes shown in the upper and lower half of every cell; `idle` is the last code.

    `left` and `right` are the first and the end column of each bar; `code` is the code it shows.
    """

    bars: Rectangles
    code: NDArray[np.int64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    upper: NDArray[np.int64]
    lower: NDArray[np.int64]
    seconds_per_column: float

    @property
    def num_ranks(self) -> int:
        """The number of lines of the grid."""
        return len(self.upper)

    @property
    def num_columns(self) -> int:
        """The number of cells in a line."""
        return int(self.upper.shape[1])

    @property
    def idle(self) -> int:
        """The code of idle time; every smaller code is a kind and a local stage."""
        return len(Kind) * self.bars.num_local_stages

    def decode(self, code: int) -> tuple[Kind, int]:
        """Return the kind of a code, and the index of its stage on its rank."""
        kind, local_stage = divmod(code, self.bars.num_local_stages)
        return Kind(kind), local_stage


@dataclass(frozen=True, slots=True)
class WideBar:
    """A bar at least two columns wide, with the digits of its microbatch if they fit."""

    rank: int
    left: int
    right: int
    code: int
    digits: str
    is_overlapped: bool
    is_lower: bool

    def columns_for(self, text: str) -> slice:
        """Return the columns of a text: on the left, or on the right for a pair's lower half."""
        start = self.right - len(text) if self.is_lower else self.left
        return slice(start, start + len(text))


def fill_grid(timeline: Timeline, max_columns: int) -> Grid:
    """Fill the cells of a grid with at most `max_columns` columns."""
    bars = rectangles(timeline)
    begin, end = bars.left - bars.begin, bars.right - bars.begin
    num_columns = _choose_columns(begin, end, max(max_columns, _MIN_COLUMNS))
    seconds_per_column = bars.seconds / num_columns
    # Rounding moves a time that misses the edge of a column by rounding error onto the edge.
    begin, end = np.round(begin / seconds_per_column, 6), np.round(end / seconds_per_column, 6)
    code = bars.kind.astype(np.int64) * bars.num_local_stages + bars.local_stage
    shape, idle = (timeline.schedule.num_ranks, num_columns), len(Kind) * bars.num_local_stages
    upper, lower = (
        _find_most(bars.rank[half], begin[half], end[half], code[half], shape, idle)
        for half in (bars.top < bars.rank, bars.bottom > bars.rank)
    )
    return Grid(bars, code, _nearest(begin), _nearest(end), upper, lower, seconds_per_column)


def _choose_columns(begin: Floats, end: Floats, max_columns: int) -> int:
    """Return the most columns allowed, or fewer if every bar then fills whole columns."""
    times = np.unique(np.concatenate((begin, end)))
    steps = np.diff(times)
    steps = steps[steps > 1e-9 * times.max(initial=0.0)]
    if not len(steps):
        return max_columns
    multiples = times / steps.min()
    slices = round(float(multiples.max()))
    if slices > max_columns or np.abs(multiples - np.rint(multiples)).max() > 1e-6:
        return max_columns
    return max_columns // slices * slices


def _find_most(
    rank: NDArray[np.int32],
    begin: Floats,
    end: Floats,
    code: NDArray[np.int64],
    shape: tuple[int, int],
    idle: int,
) -> NDArray[np.int64]:
    """Return the code that takes most of each rank's column; times are in columns."""
    first = np.floor(begin).astype(np.int64)
    num_cells = np.ceil(end).astype(np.int64) - first
    bar = np.repeat(np.arange(len(rank)), num_cells)
    column = np.arange(len(bar)) - np.repeat(np.cumsum(num_cells) - num_cells - first, num_cells)
    share = np.minimum(end[bar], column + 1) - np.maximum(begin[bar], column)
    # If two bars halve a column, it goes to the bar that is rounded to it.
    share[(column >= _nearest(begin)[bar]) & (column < _nearest(end)[bar])] += 1e-6
    known, number = np.unique(code, return_inverse=True)
    cell = rank[bar].astype(np.int64) * shape[1] + column
    # One slot per cell and code; idle time comes last, so that it never wins a tie.
    num_slots = len(known) + 1
    slot = cell * num_slots + number[bar]
    filled = np.bincount(slot, weights=share, minlength=shape[0] * shape[1] * num_slots)
    filled = filled.reshape(*shape, num_slots)
    filled[..., -1] = 1 - filled.sum(axis=-1)
    most: NDArray[np.int64] = np.append(known, idle)[filled.argmax(axis=-1)]
    return most


def _nearest(time: Floats) -> NDArray[np.int64]:
    return np.floor(time + 0.5).astype(np.int64)


def wide_bars(grid: Grid) -> Iterator[WideBar]:
    """Yield the bars that have room for more than one character."""
    bars = grid.bars
    for index in np.flatnonzero(grid.right - grid.left >= 2).tolist():
        left, right = int(grid.left[index]), int(grid.right[index])
        is_overlapped = bool(bars.is_overlapped[index])
        microbatch = int(bars.microbatch[index])
        digits = "" if microbatch == ABSENT else str(microbatch)
        room = (right - left - 1) // 2 - 1 if is_overlapped else right - left - 1
        yield WideBar(
            rank=int(bars.rank[index]),
            left=left,
            right=right,
            code=int(grid.code[index]),
            digits=digits if len(digits) <= room else "",
            is_overlapped=is_overlapped,
            is_lower=is_overlapped and bool(bars.bottom[index] > bars.rank[index]),
        )
