"""Fit an order into the bytes of its ranks by recomputing and offloading what forwards save."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import MEMORY_KINDS, Kind
from penstock.ir.lookup import find_rows
from penstock.ir.rows import ABSENT, Floats
from penstock.ir.schedule import Schedule
from penstock.passes.saved import MemoryRows, insert_memory_rows
from penstock.planner.memory.holding import Insertion, RankOrder, Saved, hold
from penstock.planner.problem import SchedulingProblem
from penstock.sim.memory import byte_changes
from penstock.sim.timeline import Timeline

__all__ = ["BOTH", "OFFLOAD", "RECOMPUTE", "Way", "fit_order", "recompute_stages"]

RECOMPUTE = frozenset({Kind.RECOMPUTE})
OFFLOAD = frozenset({Kind.OFFLOAD})
BOTH = RECOMPUTE | OFFLOAD

# From the order of one rank to what to insert; None if that is not enough.
_Fitting: TypeAlias = Callable[[RankOrder], list[Insertion] | None]


@dataclass(frozen=True, slots=True)
class Way:
    """How one rank is fitted: by which means, with room for some microbatches that come back.

    What costs least gives way first, or what is needed latest.
    """

    means: frozenset[Kind]
    reserve: int = 0
    is_latest_first: bool = False


def fit_order(
    problem: SchedulingProblem, timeline: Timeline, ways: Sequence[Way]
) -> Schedule | None:
    """Return an order that keeps the limit, each rank in its way, or None if one does not.

    `timeline` is a run of the order, perhaps with other memory actions, which says when there is
    time for copies.
    """
    return _fit(problem, timeline, [partial(_hold, way=way) for way in ways])


def recompute_stages(problem: SchedulingProblem, timeline: Timeline) -> Schedule | None:
    """Return an order that keeps the limit by recomputing every microbatch of some stages."""
    return _fit(problem, timeline, [_recompute_stages] * problem.ranks)


def _hold(order: RankOrder, way: Way) -> list[Insertion] | None:
    largest = max((saved.bytes for saved in order.saved), default=0.0)
    return hold(order, way.means, way.reserve * largest, is_latest_first=way.is_latest_first)


def _recompute_stages(order: RankOrder) -> list[Insertion] | None:
    """Recompute whole stages, the first ones first, until what is left fits."""
    stages = sorted({saved.stage for saved in order.saved})
    for count in range(len(stages) + 1):
        again = [saved for saved in order.saved if saved.stage in stages[:count]]
        if _peak(order, again) <= order.capacity * (1 + 1e-9):
            return [Insertion(Kind.RECOMPUTE, saved, saved.backward) for saved in again]
    return None


def _peak(order: RankOrder, again: list[Saved]) -> float:
    change = np.zeros(len(order.start) + 1)
    for saved in order.saved:
        taken = saved.inputs if saved in again else saved.bytes
        change[saved.forward] += taken
        change[saved.backward] += saved.bytes - taken
    change[1:] -= order.frees
    return float(np.cumsum(change).max())


def _fit(
    problem: SchedulingProblem, timeline: Timeline, fittings: Sequence[_Fitting]
) -> Schedule | None:
    plain, times = _without_memory_actions(timeline)
    found: list[tuple[int, Insertion]] = []
    for rank, order in enumerate(_rank_orders(problem, plain, times)):
        insertions = fittings[rank](order)
        if insertions is None:
            return None
        found += [(int(plain.rows.first[rank]), insertion) for insertion in insertions]
    new = MemoryRows(
        np.array([item.kind for _, item in found], dtype=np.int8),
        np.array([item.saved.stage for _, item in found], dtype=np.int64),
        np.array([item.saved.microbatch for _, item in found], dtype=np.int64),
        np.array([first + item.before for first, item in found], dtype=np.int64),
    )
    return insert_memory_rows(plain, new) if found else plain


def _without_memory_actions(timeline: Timeline) -> tuple[Schedule, NDArray[np.float64]]:
    """Return the order without memory actions, and when its rows start and end."""
    schedule = timeline.schedule
    kept = ~schedule.rows.is_kind(*MEMORY_KINDS)
    times = np.stack((timeline.start[kept], timeline.end[kept]))
    return replace(schedule, rows=schedule.rows.keep(kept)), times


def _rank_orders(
    problem: SchedulingProblem, schedule: Schedule, times: Floats
) -> Iterator[RankOrder]:
    """Yield the order of every rank with its times and bytes."""
    rows, lookup, costs = schedule.rows, find_rows(schedule), problem.costs
    scales = problem.scales[rows.microbatch]
    changes = byte_changes(costs, problem.stages)
    frees = -np.minimum(changes[rows.kind, rows.stage], 0.0) * scales
    taken = np.maximum(changes[rows.kind, rows.stage], 0.0) * scales
    inputs = costs.saved_input_bytes(problem.stages)
    again = costs.recompute_seconds(problem.stages)
    waits = _waits(schedule, times)
    for rank in range(problem.ranks):
        begin, end = int(rows.first[rank]), int(rows.first[rank + 1])
        forwards = begin + np.flatnonzero(rows.kind[begin:end] == Kind.FORWARD)
        saved = []
        for row in forwards.tolist():
            stage, microbatch = int(rows.stage[row]), int(rows.microbatch[row])
            backward = int(lookup.backward_input[stage, microbatch])
            if backward == ABSENT:
                continue
            scale, size = float(scales[row]), float(taken[row])
            copy = size / costs.host_link if costs.host_link is not None else np.inf
            seconds = max(0.0, float(again[stage]) * scale - float(waits[backward]))
            kept = float(inputs[stage]) * scale
            places = row - begin, backward - begin
            saved.append(Saved(stage, microbatch, *places, size, kept, copy, seconds))
        yield RankOrder(
            tuple(saved),
            times[0, begin:end],
            times[1, begin:end],
            frees[begin:end],
            float(problem.capacity[rank]),
        )


def _waits(schedule: Schedule, times: Floats) -> Floats:
    """Return, per row, how long its rank waits before it."""
    start, end = times
    waits = np.zeros(len(start))
    waits[1:] = np.maximum(start[1:] - end[:-1], 0.0)
    waits[schedule.rows.first[:-1]] = 0.0
    return waits
