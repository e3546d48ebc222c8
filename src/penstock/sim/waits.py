"""Why the ranks of a timeline were idle, simulated or recorded: what each waited for.

         free           reached    arrival  start
rank 1    |  waited for   | transfer |  pause |  action      `reached`: the awaited work was done
rank 0    ...... awaited  |                                  `arrival`: its value was here

A timeline has no costs, so a transfer is taken to last as long as the fastest message of its link.
In a simulated timeline that is its cost, wherever anybody waited for it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import ABSENT, Floats, Ints
from penstock.sim.explain import Gap
from penstock.sim.repeated import fastest_messages
from penstock.sim.timeline import Timeline

__all__ = ["Idle", "Waits", "find_waits"]

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle seconds of all ranks by reason.

    `work` has the waits for work, by its kind; in `pauses` a rank had all that it needed; `edges`
    are before a rank's first action and after its last.
    """

    work: dict[Kind, float]
    transfer: float
    pauses: float
    edges: float


@dataclass(frozen=True, eq=False)
class Waits:
    """For the first row of each piece of work: when its rank was free, and which need was last.

    `slot` is the index in `graph.need` of the last need, or -1 where the row did not wait;
    `reached` and `arrival` are when that need was done and when its value arrived.
    """

    timeline: Timeline
    graph: Graph
    free: Floats
    slot: Ints
    reached: Floats
    arrival: Floats

    @cached_property
    def gaps(self) -> Ints:
        """The rows before which their rank was idle, after its first compute."""
        rows, start = self.timeline.schedule.rows, self.timeline.start
        computes = np.concatenate(([0], np.cumsum(rows.is_compute)))
        first = np.repeat(computes[rows.first[:-1]], np.diff(rows.first))
        idle = (start > self.free + _tolerance(self.timeline)) & ~rows.is_kind(*_RECEIVES)
        return np.flatnonzero(idle & ~rows.joined & (computes[:-1] > first))

    @property
    def idle(self) -> Idle:
        """All idle seconds by reason; they add up to those of the timeline."""
        gap, start, rows = self.gaps, self.timeline.start, self.timeline.schedule.rows
        free, waited = self.free[gap], self.slot[gap] != ABSENT
        reached, arrival = (
            np.where(waited, np.clip(column[gap], free, start[gap]), free)
            for column in (self.reached, self.arrival)
        )
        kind = rows.kind[self._origins(self.slot[gap][waited])]
        seconds = np.bincount(kind, (reached - free)[waited], len(Kind))
        # Rounding errors are not idle time.
        least = 1e-9 * self.timeline.end_time
        whole = np.sum(self.timeline.idle_seconds)
        transfer, pauses, edges = (
            float(value) if value > least else 0.0
            for value in (
                (arrival - reached).sum(),
                (start[gap] - arrival).sum(),
                whole - (start[gap] - free).sum(),
            )
        )
        work = {kind: float(seconds[kind]) for kind in Kind if seconds[kind] > least}
        return Idle(work, transfer, pauses, edges)

    @property
    def awaited(self) -> tuple[Gap, ...]:
        """The idle times in which a rank waited for something, in the order of the ranks."""
        rows, start = self.timeline.schedule.rows, self.timeline.start
        found = []
        for row in self.gaps[self.slot[self.gaps] != ABSENT].tolist():
            need = int(self.graph.need[self.slot[row]])
            begin, end = float(self.free[row]), float(start[row])
            on_its_way = min(end, float(self.arrival[row])) - max(begin, float(self.reached[row]))
            # The value may have been here before the rank was free, and nothing was on its way.
            on_its_way = max(0.0, on_its_way)
            action, cause = rows.action(row), rows.action(need)
            gap = Gap(rows.rank(row), begin, end, action, cause, rows.rank(need), on_its_way)
            found.append(gap)
        return tuple(found)

    def _origins(self, slots: Ints) -> Ints:
        """Return the compute rows that made what is needed, also through messages."""
        rows, graph = self.timeline.schedule.rows, self.graph
        # A row that needs a receive needs the matching send right after it; see ir/graph.py.
        origin = graph.need[slots + rows.is_kind(*_RECEIVES)[graph.need[slots]]]
        sent = np.flatnonzero(rows.is_kind(*_SENDS)[origin])
        origin[sent] = graph.need[graph.first[origin[sent]]]
        return origin

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The compute rows that led to the end of the step, each what the next one waited for.

        >>> from penstock.assembly import build
        >>> from penstock.sim.engine import simulate
        >>> timeline = simulate(build("GPipe", ranks=2, microbatches=2))
        >>> path = find_waits(timeline).critical_path
        >>> " ".join(str(timeline.span(row).action) for row in path)
        '0F0 1F0 1F1 1B0 0B0 0B1'
        """
        timeline, rows = self.timeline, self.timeline.schedule.rows
        opens, first = rows.opening_row(), set(rows.first.tolist())
        row = int(np.argmax(timeline.end))
        # In a recorded step that did not keep to its needs, rows may wait for each other.
        path: dict[int, None] = {}
        while row not in path:
            path[row] = None
            row = int(opens[row])
            if self.slot[row] != ABSENT:
                row = int(self.graph.need[self.slot[row]])
            elif row not in first:
                row -= 1
            else:
                break
        is_compute = rows.is_compute
        return tuple(row for row in reversed(path) if is_compute[row])


def find_waits(timeline: Timeline) -> Waits:
    """Find what kept each piece of work of a timeline from starting earlier."""
    rows, start = timeline.schedule.rows, timeline.start
    graph = build_graph(timeline.schedule)
    opens = rows.opening_row()
    work = opens[np.repeat(np.arange(len(rows)), np.diff(graph.first))]
    reached = np.where(rows.is_kind(*_RECEIVES), start, timeline.end)[graph.need]
    arrival = reached + fastest_messages(timeline.schedule, graph, start[work], reached)
    free, tolerance = _free(timeline)[opens], _tolerance(timeline)
    latest = np.full(len(rows), -np.inf)
    np.maximum.at(latest, work, arrival)
    # The rank of a first row is free when it starts, so only its needs say why not earlier.
    is_first = np.zeros(len(rows), dtype=np.bool_)
    is_first[rows.first[:-1]] = True
    is_cause = (arrival >= latest[work] - tolerance) & (
        (arrival > free[work] + tolerance) | is_first[work]
    )
    slot = np.full(len(rows), ABSENT, dtype=np.int64)
    slot[work[is_cause]] = np.flatnonzero(is_cause)
    waiting, times = np.flatnonzero(slot != ABSENT), (start.copy(), start.copy())
    for column, values in zip(times, (reached, arrival), strict=True):
        column[waiting] = values[slot[waiting]]
    return Waits(timeline, graph, free, slot, *times)


def _tolerance(timeline: Timeline) -> float:
    """Return the difference of times below which it is a rounding error."""
    return 1e-12 * max(1.0, timeline.end_time)


def _free(timeline: Timeline) -> Floats:
    """Return when each row's rank became free; for a first row, its own start."""
    rows, start = timeline.schedule.rows, timeline.start
    done = np.where(rows.is_kind(*_RECEIVES), start, timeline.end)
    if timeline.program is not None:
        occupied = timeline.program.prices.busy[: len(rows)]
        done = np.where(timeline.program.is_beside, start + occupied, done)
    free = np.empty(len(rows))
    for begin, end in zip(rows.first[:-1], rows.first[1:], strict=True):
        free[begin] = start[begin]
        free[begin + 1 : end] = np.maximum.accumulate(done[begin : end - 1])
    return free
