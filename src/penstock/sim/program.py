"""What the clock runs: the rows of a schedule, and lanes for what runs beside the ranks.

rank 0        0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD         in the rank's list, a collective takes
collectives   |--0UNSHARD--|           |-0REDUCE_GRAD-|     the part that occupies the rank; the
wire 1               |0F0|0F1|                              rest is in a lane of its own

device to host     |--0F0--|                    OFFLOAD waits for a copy that begins after its F;
host to device                     |--0F0--|    RELOAD begins one that its B waits for

A lane is one more list that is run strictly in order, so one clock runs everything. The first use
of a stage needs its UNSHARD, and a rank ends with its last collective. The messages of a shared
wire are a lane too, in the order in which they are ready if all ranks begin a step together.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from penstock.costs import COLLECTIVES, Costs, Prices, price, transfer_seconds
from penstock.costs.copies import find_copies
from penstock.ir.actions import Kind
from penstock.ir.clock import Run, run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import ABSENT, Floats, Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.sim.wires import order_messages

__all__ = ["BESIDE_KINDS", "COLLECTIVE_KINDS", "Program", "make_program"]

Longs = NDArray[np.int64]

COLLECTIVE_KINDS = tuple(Kind[name.upper()] for name in COLLECTIVES)
BESIDE_KINDS = (*COLLECTIVE_KINDS, Kind.OFFLOAD, Kind.RELOAD)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


@dataclass(frozen=True, eq=False)
class Program:
    """Rows, needs and prices for the clock; those of the schedule come first, then those of lanes.

    `origin` is the row of the schedule that each row belongs to, and `owner` the rank that is done
    only when a lane is, per lane, or -1 for a wire.
    """

    schedule: Schedule
    rows: Rows
    graph: Graph
    prices: Prices
    origin: Longs
    owner: Longs

    @classmethod
    def of_rows(cls, schedule: Schedule, graph: Graph, prices: Prices) -> "Program":
        """Return the program of a schedule in which nothing runs beside the ranks."""
        each, nobody = np.arange(len(schedule.rows)), np.zeros(0, dtype=np.int64)
        return cls(schedule, schedule.rows, graph, prices, each, nobody)

    def run(self, begin: Floats | None = None) -> Run:
        """Run everything; `begin` is when each list begins."""
        prices = self.prices
        return run_in_order(
            self.rows,
            self.graph,
            duration=prices.duration,
            busy=prices.busy,
            lag=prices.lag,
            begin=begin,
        )

    @property
    def is_beside(self) -> NDArray[np.bool_]:
        """Per row of the schedule, whether some of it runs in a lane beside its rank."""
        found = np.zeros(len(self.schedule.rows), dtype=np.bool_)
        found[self._beside(*BESIDE_KINDS)[1]] = True
        return found

    def show(self, start: Floats, end: Floats) -> None:
        """Set when rows of the schedule start and end, for those that lanes have a part of.

        `start` and `end` are those of all rows; a collective lasts until its lane is done with
        it, and starts with the first part that takes any time. An OFFLOAD starts with its copy,
        and lasts until its rank has waited for that; a RELOAD lasts until its copy has ended.
        """
        out, offload = self._beside(Kind.OFFLOAD)
        start[offload] = start[out]
        back, reload = self._beside(Kind.RELOAD)
        end[reload] = end[back]
        lane, main = self._beside(*COLLECTIVE_KINDS)
        takes_none = end[main] == start[main]
        start[main] = np.where(takes_none, start[lane], start[main])
        end[main] = end[lane]
        message = np.flatnonzero(np.arange(len(self.rows)) >= len(self.schedule.rows))
        message = np.setdiff1d(message, np.concatenate((lane, out, back)))
        if len(message) and self.schedule.has_communication:
            for row in message.tolist():
                needed = self.graph.need[self.graph.first[row] : self.graph.first[row + 1]]
                receive = needed[self.rows.is_kind(*_RECEIVES)[needed]]
                end[receive] = end[row]

    def _beside(self, *kinds: Kind) -> tuple[Longs, Longs]:
        """Return the rows of these kinds in lanes, and those in the lists of the ranks."""
        beyond = np.arange(len(self.schedule.rows), len(self.rows))
        lane = beyond[self.rows.is_kind(*kinds)[beyond]]
        return lane, self.origin[lane]


def make_program(schedule: Schedule, costs: Costs) -> Program:
    """Return what the clock runs for a schedule at these costs per stage."""
    graph = build_graph(schedule)
    plain = Program.of_rows(schedule, graph, price(costs, schedule, graph))
    program = _add_collectives(plain, costs) if costs.has_collectives else plain
    if costs.host_link is not None and schedule.rows.has_memory_actions:
        program = _add_copies(program, costs)
    return program if costs.wires is None else _add_wires(program, costs)


@dataclass(slots=True)
class _Draft:
    """A program to which lanes are added, with their needs as (row, need, seconds)."""

    base: Program
    lanes: list[Longs] = field(default_factory=list)
    seconds: list[Floats] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    needs: list[tuple[Ints, Ints, Floats]] = field(default_factory=list)
    size: int = 0

    def add_lane(self, rows: Longs, seconds: Floats, owner: int) -> Longs:
        """Add a lane with a part of each of these rows; return the new rows."""
        new = len(self.base.rows) + self.size + np.arange(len(rows))
        self.lanes.append(rows)
        self.seconds.append(seconds)
        self.owners.append(owner)
        self.size += len(rows)
        return new

    def add_needs(self, rows: Ints, needs: Ints, seconds: Floats | float = 0.0) -> None:
        """Make each row need another, with these seconds in between."""
        self.needs.append((rows, needs, np.broadcast_to(np.float64(seconds), len(rows))))

    def finish(self) -> Program:
        base = self.base
        index = np.concatenate((np.arange(len(base.rows)), *self.lanes))
        lengths = [len(lane) for lane in self.lanes]
        first = np.concatenate((base.rows.first, len(base.rows) + np.cumsum(lengths)))
        joined = np.concatenate((base.rows.joined, np.zeros(self.size, dtype=np.bool_)))
        rows = replace(base.rows.take(index, first), joined=joined)
        extra = np.concatenate(self.seconds)
        prices = Prices(
            np.concatenate((base.prices.duration, extra)),
            np.concatenate((base.prices.busy, extra)),
            self._columns()[3],
            np.concatenate((base.prices.host, 0 * extra)),
        )
        owner = np.concatenate((base.owner, np.array(self.owners, dtype=np.int64)))
        return Program(
            base.schedule, rows, self._graph(len(rows)), prices, base.origin[index], owner
        )

    def _columns(self) -> tuple[Longs, Longs, Longs, Floats]:
        graph = self.base.graph
        row = np.repeat(np.arange(len(graph.first) - 1), np.diff(graph.first))
        nowhere = [np.full(len(rows), ABSENT) for rows, _, _ in self.needs]
        rows = np.concatenate((row, *(rows for rows, _, _ in self.needs)))
        needs = np.concatenate((graph.need, *(needs for _, needs, _ in self.needs)))
        links = np.concatenate((graph.link, *nowhere))
        lags = np.concatenate((self.base.prices.lag, *(lag for _, _, lag in self.needs)))
        order = np.argsort(rows, kind="stable")
        columns = rows[order], needs[order], links[order]
        first, second, third = (column.astype(np.int64) for column in columns)
        return first, second, third, lags[order].astype(np.float64)

    def _graph(self, num_rows: int) -> Graph:
        rows, needs, links, _ = self._columns()
        first = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=num_rows))))
        return Graph(first.astype(np.int64), needs.astype(np.int32), links)


def _seconds_beside(schedule: Schedule, costs: Costs) -> Floats:
    """Return, per row, the seconds that it takes beside its rank."""
    table = np.zeros((len(Kind), schedule.num_stages))
    for name, kind in zip(COLLECTIVES, COLLECTIVE_KINDS, strict=True):
        table[kind] = costs.collective_overlap * costs.per_stage(name, schedule.num_stages)
    return table[schedule.rows.kind, schedule.rows.stage]


def _add_collectives(plain: Program, costs: Costs) -> Program:
    """Add a lane for each rank that has collectives, if any of them runs beside compute."""
    seconds = _seconds_beside(plain.schedule, costs)
    if not seconds.any():
        return plain
    draft, rows = _Draft(plain), plain.rows
    rank_of_row = rows.rank_of_row()
    side = np.flatnonzero(rows.is_kind(*COLLECTIVE_KINDS))
    for rank in np.unique(rank_of_row[side]).tolist():
        mine = side[rank_of_row[side] == rank]
        lane = draft.add_lane(mine, seconds[mine], rank)
        draft.add_needs(lane, mine)
        end = int(rows.first[rank + 1])
        for new, row in zip(lane.tolist(), mine.tolist(), strict=True):
            uses = (rows.stage[row:end] == rows.stage[row]) & rows.is_compute[row:end]
            if rows.kind[row] == Kind.UNSHARD and uses.any():
                draft.add_needs(np.array([row + int(uses.argmax())]), np.array([new]))
    return draft.finish()


def _add_copies(program: Program, costs: Costs) -> Program:
    """Add two lanes for each rank that offloads: copies to its host, and copies back."""
    draft = _Draft(program)
    for copies in find_copies(program.schedule, costs):
        lane = draft.add_lane(copies.row, copies.seconds, ABSENT)
        draft.add_needs(lane, copies.begins_after)
        draft.add_needs(copies.awaited_by, lane)
    return draft.finish() if draft.lanes else program


def _add_wires(program: Program, costs: Costs) -> Program:
    """Add a lane for each wire, with its messages in the order in which they are ready."""
    schedule, graph, ranks = program.schedule, program.graph, program.schedule.num_ranks
    crosses = graph.link >= 0
    wire = np.zeros(len(graph.need), dtype=np.int64)
    wire[crosses] = costs.per_wire(ranks)[np.divmod(graph.link[crosses], ranks)]
    seconds = transfer_seconds(costs, schedule, program.rows, graph)
    is_carried = (wire > 0) & (seconds > 0)
    if not is_carried.any():
        return program
    # With messages in the schedule, a value has two needs: its receive, and right after it its
    # send. The message is known by the first of them.
    is_receive = program.rows.is_kind(*_RECEIVES)[graph.need]
    is_second = np.zeros(len(wire), dtype=np.bool_)
    is_second[np.flatnonzero(is_receive) + 1] = True
    lag = np.where(is_carried, program.prices.lag - seconds, program.prices.lag)
    apart = replace(program, prices=replace(program.prices, lag=np.maximum(lag, 0.0)))
    carried = np.where(is_carried, wire, 0)
    slots = order_messages(apart.rows, graph, apart.prices, carried, is_second, seconds)
    draft = _Draft(apart)
    need = graph.need.copy()
    for number in np.unique(carried[slots]).tolist():
        mine = slots[carried[slots] == number]
        source = graph.need[mine + is_receive[mine]]
        lane = draft.add_lane(source, seconds[mine], ABSENT)
        pairs = mine[is_receive[mine]]
        draft.add_needs(lane, graph.need[mine], apart.prices.lag[mine])
        draft.add_needs(lane[is_receive[mine]], graph.need[pairs + 1], apart.prices.lag[pairs + 1])
        need[mine] = lane
        need[pairs + 1] = lane[is_receive[mine]]
    lag = np.where(is_carried, 0.0, apart.prices.lag)
    draft.base = replace(
        apart, graph=replace(graph, need=need), prices=replace(apart.prices, lag=lag)
    )
    # An order that waits for ever may end before its first message.
    return draft.finish() if draft.lanes else program
