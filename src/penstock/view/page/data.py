"""A timeline as the columns of numbers that a page carries, at a few bytes per action.

An action's *name* is its kind, stage and peer. Whatever it needs belongs to its own microbatch,
so that needs are names too: rows with the same name and the same needs have one *shape*.

names    kind stage peer              rows   shape  microbatch  memory   as differences
shapes   name and the needs' names           gap from the end before  duration  joined  late

Times are whole ticks, of which a step has at least 2**29: the page shows them as they are in the
timeline to within half of a billionth of the step, and exactly where they are multiples of a tick,
which is a power of two. `late` is the number of the need that the row waited for, from 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import frexp

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.ir.rows import ABSENT, Bools, Floats, Ints, Rows
from penstock.sim.timeline import Timeline
from penstock.sim.waits import Waits
from penstock.view.page.columns import LIMIT, encode_columns

__all__ = ["PageData", "page_data", "tick_of"]

# Memory is drawn a few dozen pixels high, and written with three digits.
_MEMORY_LEVELS = 2**16


@dataclass(frozen=True, slots=True)
class PageData:
    """What a page needs to know of one timeline, as values that JSON has."""

    name: str
    begin: float
    tick: float
    memory_unit: str
    memory_tick: float
    microbatches: int
    rank_of_stage: Sequence[int]
    columns: dict[str, object]


def page_data(name: str, waits: Waits) -> PageData:
    """A timeline as a page carries it, with what each of its actions waited for."""
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
    """The unit in which a page keeps the times of a timeline: a power of two, in seconds."""
    return _power_of_two(float(timeline.end.max() - timeline.start.min()), LIMIT)


def _power_of_two(largest: float, levels: int) -> float:
    """The power of two of which `largest` has at most `levels` and at least half as many."""
    return 2.0 ** (frexp(largest)[1]) / levels if largest else 1.0


def _held(timeline: Timeline) -> tuple[Floats, str]:
    """What each row's rank holds because of it: bytes where they are known, else activations."""
    if timeline.peak_bytes:
        return timeline.memory, "bytes"
    rows = timeline.schedule.rows
    change = rows.is_kind(Kind.FORWARD).astype(np.int64)
    change -= rows.is_kind(Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT)
    held = np.cumsum(change)
    before = np.concatenate(([0], held))[rows.first[:-1]]
    return (held - np.repeat(before, np.diff(rows.first))).astype(np.float64), "activations"


def _steps(column: Ints) -> NDArray[np.int64]:
    """How much each number is above the one before; the first is above zero."""
    steps = column.astype(np.int64)
    steps[1:] -= column[:-1]
    return steps


def _gaps(start: NDArray[np.int64], end: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """From the end of the row before to each start; a joined row starts with the row before."""
    before = np.concatenate(([0], np.where(rows.joined[1:], start[:-1], end[:-1])))
    before[rows.first[:-1]] = 0
    return start - before


def _shapes(waits: Waits) -> dict[str, Ints]:
    """For every row its shape, the shapes that there are, and their names."""
    rows, graph = waits.timeline.schedule.rows, waits.graph
    names, name = np.unique(
        np.stack([rows.kind, rows.stage, rows.peer], axis=1), axis=0, return_inverse=True
    )
    name = name.reshape(-1)
    size = np.diff(graph.first)
    # Needs side by side, so that rows with the same ones are equal.
    needs = np.full((len(rows), int(size.max(initial=0))), ABSENT, dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), size)
    place = np.arange(len(graph.need)) - graph.first[:-1][row]
    needs[row, place] = name[graph.need]
    shapes, shape = np.unique(np.column_stack([name, needs]), axis=0, return_inverse=True)
    has_need = shapes[:, 1:] != ABSENT
    return {
        "name_kind": names[:, 0],
        "name_stage": names[:, 1],
        "name_peer": names[:, 2],
        "shape_name": shapes[:, 0],
        "shape_size": has_need.sum(axis=1),
        "shape_need": shapes[:, 1:][has_need],
        "shape": _steps(shape.reshape(-1)),
    }


def _late(waits: Waits) -> NDArray[np.int64]:
    """For every row the number, from 1, of the need that its work waited for, else 0."""
    late = np.zeros(len(waits.slot), dtype=np.int64)
    slots = waits.slot[waits.slot != ABSENT]
    owner = np.searchsorted(waits.graph.first, slots, side="right") - 1
    late[owner] = slots - waits.graph.first[owner] + 1
    return late
