"""Orders in slots: dry runs, how wide each kind of action is, and what slots look like."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from penstock.atomic_files import write_atomically
from penstock.dropin.names.actions import OVERLAP_F_B, TYPE_OF_KIND, WAITS, _Action, to_works
from penstock.dropin.names.lists import (
    AnyOrder,
    AnySlots,
    Order,
    Slots,
    members,
    to_actions,
    to_schedule,
)
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.clock import find_cycle, run_in_order
from penstock.ir.graph import Graph, NeedList, build_graph, join_needs
from penstock.ir.lookup import find_rows
from penstock.ir.rows import ABSENT, Floats
from penstock.ir.schedule import Schedule
from penstock.sim.timeline import Timeline
from penstock.view.palette import BORDER, LOOKS

__all__ = [
    "_ComputationTypeVisual",
    "_dump_chrometrace",
    "_format_pipeline_order",
    "_simulate_comms_compute",
    "action_type_to_color_mapping",
    "fill_slots",
    "read_timeline",
    "run_slots",
    "space",
]


class SlotsDeadlockError(DeadlockError, RuntimeError):
    """An order never finishes; also a `RuntimeError`, which torch's users expect here."""


@dataclass(frozen=True, slots=True)
class _ComputationTypeVisual:
    """How a kind is drawn: its colour, its name and its width in slots."""

    color: str
    text: str = ""
    width: int = 1


def _visual(kind: Kind) -> _ComputationTypeVisual:
    width = 2 if kind is Kind.FULL_BACKWARD else 1
    return _ComputationTypeVisual(LOOKS[kind].colour, LOOKS[kind].label, width)


action_type_to_color_mapping = {
    **{TYPE_OF_KIND[kind]: _visual(kind) for kind in TYPE_OF_KIND},
    **dict.fromkeys(WAITS, _ComputationTypeVisual(BORDER, "Wait")),
    OVERLAP_F_B: _ComputationTypeVisual(BORDER, "Overlapped", 3),
}


def _width(entry: _Action | None) -> int:
    """Return how many slots an entry takes; an overlap takes those of all its actions."""
    if entry is None:
        return 1
    kinds = (member.computation_type for member in members(entry))
    return sum(action_type_to_color_mapping[kind].width for kind in kinds)


def run_slots(
    schedule: Schedule, graph: Graph, *, width: Floats | None = None, lag: Floats | None = None
) -> Floats:
    """Return the slot in which each row starts; rows are one slot wide unless widths are given."""
    rows = schedule.rows
    slots = np.ones(len(rows)) if width is None else width
    lags = np.zeros(len(graph.need)) if lag is None else lag
    run = run_in_order(rows, graph, duration=slots, busy=slots, lag=lags)
    if not run.is_finished:
        pairs = [(run.stuck_at[rank], run.waits_for[rank]) for rank in find_cycle(rows, run)]
        waits = [f"{rows.action(int(a))} waits for {rows.action(int(b))}" for a, b in pairs]
        raise SlotsDeadlockError(f"the order never finishes; {', '.join(waits)}")
    return run.start


def _take_slots(schedule: Schedule, rank: int, start: Floats, is_wide: bool) -> Slots:
    """Return one rank's actions where they start, with `None` for every idle slot before them."""
    rows = schedule.rows
    begins = [int(start[row]) for row in rows.of_rank(rank) if not rows.joined[row]]
    slots: Slots = []
    clock = 0
    for action, begin in zip(to_actions(rows, rank), begins, strict=True):
        slots += [None] * (begin - clock)
        slots.append(action)
        clock = begin + (_width(action) if is_wide else 1)
    return slots


def fill_slots(schedule: Schedule, start: Floats, ranks: Iterable[int]) -> Order:
    """Return the lists of a schedule from `to_schedule`, each action in its slot."""
    order: Order = {}
    num_stages = schedule.num_stages - schedule.num_ranks
    for number, rank in enumerate(sorted(ranks)):
        slots = _take_slots(schedule, number, start, is_wide=False)
        # Beyond the stages of the model are those whose actions are idle slots.
        order[rank] = [a if a is not None and a.stage_index < num_stages else None for a in slots]
    return order


def space(schedule: Schedule) -> list[Slots]:
    """Return every rank's actions, each in a slot after what it depends on, all of one length."""
    rows, graph = schedule.rows, build_graph(schedule)
    widths = [action_type_to_color_mapping[TYPE_OF_KIND[kind]].width for kind in TYPE_OF_KIND]
    opening = rows.opening_row()
    # Each member of an overlap takes the slots of all.
    width = np.bincount(opening, np.array(widths)[rows.kind])[opening].astype(np.float64)
    start = run_slots(schedule, graph, width=width)
    end = int((start + width).max())
    spaced = [_take_slots(schedule, rank, start, True) for rank in range(rows.num_ranks)]
    return [slots + [None] * (end - sum(map(_width, slots))) for slots in spaced]


def read_timeline(schedule: Sequence[AnySlots]) -> Timeline:
    """Return the times of a list of slots: each entry begins where the one before ends."""
    times: list[tuple[int, int]] = []
    for rank in schedule:
        clock = 0
        for entry in rank:
            end = clock + _width(entry)
            if entry is not None and entry.computation_type not in WAITS:
                times += [(clock, end)] * len(members(entry))
            clock = end
    starts, ends = np.array(times, dtype=np.float64).reshape(-1, 2).T
    return Timeline(Schedule.from_orders(map(to_works, schedule)), starts, ends, 0 * starts)


def _simulate_comms_compute(
    pipeline_order: AnyOrder, stage_to_rank: Callable[[int], int], num_stages: int
) -> Order:
    """Run an order in slots of one action each; a message comes in the slot of its send."""
    order = {rank: [a for a in slots if a is not None] for rank, slots in pipeline_order.items()}
    schedule = to_schedule(order, stage_to_rank, num_stages)
    graph = join_needs(len(schedule.rows), _receives_wait(schedule), build_graph(schedule))
    crosses = (graph.link >= 0) & schedule.has_communication
    return fill_slots(
        schedule, run_slots(schedule, graph, lag=np.where(crosses, -1.0, 0.0)), order
    )


def _receives_wait(schedule: Schedule) -> list[NeedList]:
    rows, found, lists = schedule.rows, find_rows(schedule), []
    rank = rows.rank_of_row()
    forward = found.receive_forward, found.send_forward
    for receives, sends in (forward, (found.receive_backward, found.send_backward)):
        receive, send = receives[receives != ABSENT], sends[receives != ABSENT]
        for lonely in receive[send == ABSENT].tolist():
            at, position = rows.position(lonely)
            raise ScheduleError(
                f"rank {at}, position {position}, {rows.action(lonely)}: nobody sends what it "
                "receives"
            )
        lists.append(NeedList(receive, send, rank[send] * schedule.num_ranks + rank[receive]))
    return lists


def _format_pipeline_order(pipeline_order: AnyOrder, error_step_number: int | None = None) -> str:
    """Return a table with ranks across and steps down; the step of an error is marked."""
    columns = [
        [f"Rank {place}", *("" if action is None else str(action) for action in slots)]
        for place, (_, slots) in enumerate(sorted(pipeline_order.items()))
    ]
    steps = range(max(map(len, columns)) - 1)
    digits = len(str(len(steps) - 1))
    labels = [f"Step {step:0{digits}}: " for step in steps]
    least = len("Step ") + digits
    widths = [max(least, *map(len, column)) for column in columns]
    head, *rows = (
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip_longest(*columns, fillvalue="")
    )
    marks = [" <-- ERROR HERE" if step == error_step_number else "" for step in steps]
    lines = [label + row + mark for label, row, mark in zip(labels, rows, marks, strict=True)]
    return "\n".join([" " * (least + len(": ")) + head, *lines]) + "\n"


def _dump_chrometrace(schedule: AnyOrder, filename: Path | str) -> None:
    """Write slots as a trace that Chrome and Perfetto open, a microsecond per slot."""
    events = []
    for rank in sorted(schedule):
        for slot, action in enumerate(schedule[rank]):
            if action is not None:
                kind = "computation" if action.is_compute_op else "communication"
                place = {"ph": "X", "pid": rank, "tid": rank, "ts": slot, "dur": 1}
                events.append({"name": str(action), "cat": kind, **place})
    write_atomically(filename, json.dumps({"traceEvents": events}))
