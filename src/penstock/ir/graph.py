"""What each action waits for: the one statement of what must run before what.

    forward           its producers' forwards
    input or full     its own forward, its consumers' input or full backwards
    weight            its own input backward
    send              what it sends
    recompute         its own forward, which saves only its inputs
    offload           its own forward
    reload            its own offload

A backward also needs the recompute or the reload of its microbatch, where the schedule has one.

Where sends and receives are part of the schedule, a value from another rank is there one
transfer after its send has started and its receive has been posted. What a rank lists earlier
runs earlier; that is in the order of the rows and not in the graph.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.lookup import Lookup, find_memory_rows, find_rows
from penstock.ir.rows import ABSENT, Ints
from penstock.ir.schedule import Schedule

__all__ = ["Graph", "NeedList", "build_graph", "join_needs"]


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The rows that each row needs: `need[first[row]:first[row + 1]]`.

    `link` is -1 for a need on the same rank, else sender times ranks plus receiver: the
    link over which the value travels before the waiting row may start.
    """

    first: NDArray[np.int64]
    need: NDArray[np.int32]
    link: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class NeedList:
    """Rows, each at most once, with one need each, and the link that it comes over."""

    row: Ints
    need: NDArray[np.int32]
    link: NDArray[np.int64]


@dataclass(slots=True)
class _Needs:
    """The needs that `build_graph` collects, before they are sorted by row."""

    schedule: Schedule
    lookup: Lookup
    lists: list[NeedList] = field(default_factory=list)

    def add(
        self, row: Ints, table: NDArray[np.int32], owner: Ints, link: Ints | None = None
    ) -> None:
        """Make each row need the row that `table` has for `owner` and the row's microbatch."""
        need = table[owner, self.schedule.rows.microbatch[row]]
        if (missing := np.flatnonzero(need == ABSENT)).size:
            rank, position = self.schedule.rows.position(int(row[missing[0]]))
            action = self.schedule.rows.action(int(row[missing[0]]))
            raise ScheduleError(
                f"rank {rank}, position {position}, {action}: what it waits for is not in the "
                "schedule; penstock.check says what is missing"
            )
        links = np.full(len(row), ABSENT, np.int64) if link is None else link.astype(np.int64)
        self.lists.append(NeedList(row, need, links))


def build_graph(schedule: Schedule) -> Graph:
    """Return what each row waits for, in a schedule where every action appears at most once."""
    rows = schedule.rows
    if (rows.stage >= schedule.num_stages).any() or (
        rows.microbatch >= schedule.microbatches
    ).any():
        raise ScheduleError(
            "an action names a stage or microbatch that does not exist; penstock.check says which"
        )
    lookup = find_rows(schedule)
    needs = _Needs(schedule, lookup)
    backward = lookup.backward_input
    forwards = np.flatnonzero(rows.is_kind(Kind.FORWARD))
    backwards = np.flatnonzero(rows.is_kind(Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT))
    weights = np.flatnonzero(rows.is_kind(Kind.BACKWARD_WEIGHT))

    needs.add(backwards, lookup.forward, rows.stage[backwards])
    needs.add(weights, backward, rows.stage[weights])
    messages = (lookup.receive_forward, lookup.send_forward)
    _add_neighbours(needs, forwards, lookup.forward, messages, takes_producers=True)
    messages = (lookup.receive_backward, lookup.send_backward)
    _add_neighbours(needs, backwards, backward, messages, takes_producers=False)
    for kind, table in ((Kind.SEND_F, lookup.forward), (Kind.SEND_B, backward)):
        sends = np.flatnonzero(rows.is_kind(kind))
        needs.add(sends, table, rows.stage[sends])
    if rows.has_memory_actions:
        _add_memory(needs, backwards)
    return join_needs(len(rows), needs.lists)


def _add_memory(needs: _Needs, backwards: NDArray[np.int64]) -> None:
    """Make what was saved be recomputed or back before its backward."""
    rows, found = needs.schedule.rows, find_memory_rows(needs.schedule)
    for kind, table in (
        (Kind.RECOMPUTE, needs.lookup.forward),
        (Kind.OFFLOAD, needs.lookup.forward),
        (Kind.RELOAD, found[Kind.OFFLOAD]),
    ):
        waiting = np.flatnonzero(rows.is_kind(kind))
        needs.add(waiting, table, rows.stage[waiting])
    for kind in (Kind.RECOMPUTE, Kind.RELOAD):
        has_one = found[kind][rows.stage[backwards], rows.microbatch[backwards]] != ABSENT
        needs.add(backwards[has_one], found[kind], rows.stage[backwards[has_one]])


def _add_neighbours(
    needs: _Needs,
    waiting: Ints,
    table: NDArray[np.int32],
    messages: tuple[NDArray[np.int32], NDArray[np.int32]],
    *,
    takes_producers: bool,
) -> None:
    """Make each waiting row need the same work of the stages before it (or after it)."""
    schedule = needs.schedule
    stage = schedule.rows.stage[waiting]
    holder = np.array(schedule.placement.rank_of_stage)
    for neighbour, edge in _neighbour_columns(schedule, takes_producers):
        has_one = neighbour[stage] != ABSENT
        row, here = waiting[has_one], stage[has_one]
        there, along = neighbour[here], edge[here]
        remote = holder[there] != holder[here]
        link = np.where(remote, holder[there] * schedule.num_ranks + holder[here], ABSENT)
        if not schedule.has_communication:
            needs.add(row, table, there, link)
            continue
        needs.add(row[~remote], table, there[~remote])
        for message in messages:
            needs.add(row[remote], message, along[remote], link[remote])


def _neighbour_columns(
    schedule: Schedule, takes_producers: bool
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return every stage's first, second, ... producer (or consumer) with its edge, or -1."""
    flow = schedule.dataflow
    number = {edge: index for index, edge in enumerate(flow.edges)}
    lists = [
        [(p, number[p, s]) for p in flow.producers(s)]
        if takes_producers
        else [(c, number[s, c]) for c in flow.consumers(s)]
        for s in range(flow.num_stages)
    ]
    columns = []
    for place in range(max(map(len, lists))):
        pairs = [entry[place] if place < len(entry) else (ABSENT, ABSENT) for entry in lists]
        columns.append((np.array([p for p, _ in pairs]), np.array([e for _, e in pairs])))
    return columns


def join_needs(num_rows: int, lists: list[NeedList], base: Graph | None = None) -> Graph:
    """Sort needs by the row that has them, in linear time; `base` is a graph to add them to."""
    # In place, because each column of a large schedule is hundreds of megabytes.
    first = np.zeros(num_rows + 1, dtype=np.int64)
    count = first[1:]
    if base is not None:
        np.subtract(base.first[1:], base.first[:-1], out=count)
    for entry in lists:
        count[entry.row] += 1
    np.cumsum(first, out=first)
    need = np.empty(first[-1], dtype=np.int32)
    link = np.empty(first[-1], dtype=np.int64)
    free = first[:-1].copy()
    if base is not None:
        old = np.diff(base.first)
        target = np.arange(len(base.need)) + np.repeat(free - base.first[:-1], old)
        need[target], link[target] = base.need, base.link
        free += old
    for entry in lists:
        target = free[entry.row]
        need[target], link[target] = entry.need, entry.link
        free[entry.row] = target + 1
    return Graph(first, need, link)
