"""Timelines as columns of integers for a page, at a few bytes per action.

An action's *name* is its kind, stage and peer. All its dependencies belong to its own microbatch,
so they are names too: rows with the same name and the same dependencies share one *shape*.

names    kind stage peer              rows   shape  microbatch  memory   as differences
shapes   name, names of dependencies         gap to previous end  duration  joined  late

Times are in whole ticks, at least 2**29 per step, where a tick is a power of two. The page shows
times that are multiples of a tick exactly, and others to within half a billionth of the step.
`late` is the number, from 1, of the dependency that the row waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp

import numpy as np
from numpy.typing import NDArray

from penstock.ir.rows import ABSENT, Bools, Floats, Ints, Rows
from penstock.sim.timeline import Timeline
from penstock.sim.waits import Waits
from penstock.view.html.columns import LIMIT, encode_columns

__all__ = ["PageData", "page_data", "tick_of"]

# Memory is drawn a few dozen pixels high and printed with three digits.
_MEMORY_LEVELS = 2**16
_LARGEST_KEY = 2**62


@dataclass(frozen=True, slots=True)
class PageData:
    """One timeline as JSON values for a page."""

    name: str
    begin: float
    tick: float
    memory_unit: str
    memory_tick: float
    microbatches: int
    rank_of_stage: Sequence[int]
    columns: dict[str, object]


def page_data(name: str, waits: Waits) -> PageData:
    """Convert a timeline and its waits to the data of a page."""
    timeline, rows = waits.timeline, waits.timeline.schedule.rows
    begin, tick = float(timeline.start.min()), tick_of(timeline)
    start, end = (
        np.rint((column - begin) / tick).astype(np.int64)
        for column in (timeline.start, timeline.end)
    )
    memory, unit = _held(timeline)
    memory_tick = _power_of_two(float(np.abs(memory).max()), _MEMORY_LEVELS)
    columns: dict[str, Ints | Bools] = {
        "first": rows.first,
        **_shapes(waits),
        "microbatch": _steps(rows.microbatch),
        "joined": rows.joined,
        "late": _late(waits),
        "gap": _gaps(start, end, rows),
        "duration": end - start,
        "memory": _steps(np.rint(memory / memory_tick).astype(np.int64)),
        "critical": np.array(waits.critical_path, dtype=np.int64),
    }
    return PageData(
        name,
        begin,
        tick,
        unit,
        memory_tick,
        timeline.schedule.microbatches,
        timeline.schedule.placement.rank_of_stage,
        encode_columns(columns),
    )


def tick_of(timeline: Timeline) -> float:
    """Return the unit of a timeline's times on a page: a power of two, in seconds."""
    return _power_of_two(float(timeline.end.max() - timeline.start.min()), LIMIT)


def _power_of_two(largest: float, levels: int) -> float:
    """Return the power of two that fits into `largest` at most `levels` times, at least half."""
    return 2.0 ** (frexp(largest)[1]) / levels if largest else 1.0


def _held(timeline: Timeline) -> tuple[Floats, str]:
    """Return the memory of each row's rank: in bytes if they are known, else in activations."""
    if timeline.peak_bytes:
        return timeline.memory, "bytes"
    return timeline.held_activations.astype(np.float64), "activations"


def _steps(column: Ints) -> NDArray[np.int64]:
    """Return the difference of each number to the previous one; the first to zero."""
    steps = column.astype(np.int64)
    steps[1:] -= column[:-1]
    return steps


def _gaps(start: NDArray[np.int64], end: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """Return the gap before each row; a joined row counts from the start of the previous one."""
    before = np.concatenate(([0], np.where(rows.joined[1:], start[:-1], end[:-1])))
    before[rows.first[:-1]] = 0
    return start - before


def _shapes(waits: Waits) -> dict[str, Ints]:
    """Return the shape of every row, the table of shapes, and their names."""
    rows, graph = waits.timeline.schedule.rows, waits.graph
    named = np.stack([rows.kind, rows.stage, rows.peer])
    one, name = _number_alike(named)
    names = named[:, one]
    size = np.diff(graph.first)
    # Dependencies side by side, so that rows with the same ones compare equal.
    needs = np.full((1 + int(size.max(initial=0)), len(rows)), ABSENT, dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), size)
    position = np.arange(len(graph.need)) - graph.first[:-1][row]
    needs[0] = name
    needs[1 + position, row] = name[graph.need]
    one, shape = _number_alike(needs)
    shapes = needs[:, one].T
    has_need = shapes[:, 1:] != ABSENT
    return {
        "name_kind": names[0],
        "name_stage": names[1],
        "name_peer": names[2],
        "shape_name": shapes[:, 0],
        "shape_size": has_need.sum(axis=1),
        "shape_need": shapes[:, 1:][has_need],
        "shape": _steps(shape),
    }


def _number_alike(columns: Ints) -> tuple[Ints, Ints]:
    """Return one row of each that differs, in the order of their numbers, and which each row is.

    Rows are compared as one whole number each, which is much faster than as rows.
    """
    key, num_keys = np.zeros(columns.shape[1], dtype=np.int64), 1
    for column in columns:
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        if num_keys * (high - low + 1) > _LARGEST_KEY:
            found, key = np.unique(key, return_inverse=True)
            num_keys = len(found)
        key = key * (high - low + 1) + (column - low)
        num_keys *= high - low + 1
    _, one, number = np.unique(key, return_index=True, return_inverse=True)
    return one, number


def _late(waits: Waits) -> NDArray[np.int64]:
    """Return the number, from 1, of the dependency that each row waited for, else 0."""
    late = np.zeros(len(waits.slot), dtype=np.int64)
    slots = waits.slot[waits.slot != ABSENT]
    owner = np.searchsorted(waits.graph.first, slots, side="right") - 1
    late[owner] = slots - waits.graph.first[owner] + 1
    return late
