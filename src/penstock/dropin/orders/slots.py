"""Orders in slots: dry runs, how wide each kind of action is, and what slots look like."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from penstock.atomic_files import write_atomically
from penstock.dropin.names.actions import OVERLAP_F_B, TYPE_OF_KIND, WAITS, _Action, to_works
from penstock.dropin.names.lists import Order, Slots, members, to_actions, to_schedule
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.clock import find_cycle, run_in_order
from penstock.ir.graph import NeedList, build_graph, join_needs
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


action_type_to_color_mapping = {
    **{
        TYPE_OF_KIND[kind]: _ComputationTypeVisual(
            look.colour, look.label, 1 + (kind is Kind.FULL_BACKWARD)
        )
        for kind, look in LOOKS.items()
    },
    OVERLAP_F_B: _ComputationTypeVisual(BORDER, "Overlapped", 3),
    **{wait: _ComputationTypeVisual(BORDER, "Wait") for wait in WAITS},
}


def _width(entry: _Action | None) -> int:
    """Return how many slots an entry takes; an overlap takes those of all its actions."""
    if entry is None:
        return 1
    kinds = (member.computation_type for member in members(entry))
    return sum(action_type_to_color_mapping[kind].width for kind in kinds)


def _take_slots(schedule: Schedule, rank: int, start: Floats, is_wide: bool) -> Slots:
    """Return one rank's actions where they start, with `None` for every idle slot before them."""
    rows = schedule.rows
    here = slice(int(rows.first[rank]), int(rows.first[rank + 1]))
    starts = start[here][~rows.joined[here]].astype(int).tolist()
    slots: Slots = []
    clock = 0
    for action, begin in zip(to_actions(rows, rank), starts, strict=True):
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
    """Return every rank's actions, each in a slot after those of what it depends on.

    Afterwards every rank fills the same number of slots.
    """
    rows, graph = schedule.rows, build_graph(schedule)
    widths = [action_type_to_color_mapping[TYPE_OF_KIND[kind]].width for kind in Kind]
    opening = rows.opening_row()
    # Each member of an overlap takes the slots of all.
    width = np.bincount(opening, np.array(widths)[rows.kind])[opening].astype(np.float64)
    run = run_in_order(rows, graph, duration=width, busy=width, lag=np.zeros(len(graph.need)))
    if not run.is_finished:
        ranks = ", ".join(map(str, find_cycle(rows, run)))
        raise SlotsDeadlockError(f"deadlock: ranks {ranks} wait for one another; check the order")
    end = int((run.start + width).max())
    spaced = [_take_slots(schedule, rank, run.start, True) for rank in range(rows.num_ranks)]
    return [slots + [None] * (end - sum(map(_width, slots))) for slots in spaced]


def read_timeline(schedule: Sequence[Sequence[_Action | None]]) -> Timeline:
    """Return the times of a list of slots: each entry begins where the one before ends."""
    starts, ends = [], []
    for rank in schedule:
        clock = 0
        for entry in rank:
            drawn = () if entry is None or entry.computation_type in WAITS else members(entry)
            for _ in drawn:
                starts.append(clock)
                ends.append(clock + _width(entry))
            clock += _width(entry)
    start, end = np.array(starts, dtype=np.float64), np.array(ends, dtype=np.float64)
    return Timeline(Schedule.from_orders(map(to_works, schedule)), start, end, 0 * start)


def _simulate_comms_compute(
    pipeline_order: Mapping[int, Sequence[_Action | None]],
    stage_to_rank: Callable[[int], int],
    num_stages: int,
) -> Order:
    """Run an order in slots: every action takes one, and a rank that waits has an idle slot.

    A message can be received in the slot in which it is sent. An order that never finishes is a
    `DeadlockError`, which is a `ValueError`.
    """
    order = {rank: [a for a in slots if a is not None] for rank, slots in pipeline_order.items()}
    schedule = to_schedule(order, stage_to_rank, num_stages)
    rows = schedule.rows
    graph = join_needs(len(rows), _receives_wait(schedule), build_graph(schedule))
    crosses = (graph.link >= 0) & schedule.has_communication
    ones, lag = np.ones(len(rows)), np.where(crosses, -1.0, 0.0)
    run = run_in_order(rows, graph, duration=ones, busy=ones, lag=lag)
    if not run.is_finished:
        waits = ", ".join(
            f"{rows.action(int(run.stuck_at[rank]))} waits for "
            f"{rows.action(int(run.waits_for[rank]))}"
            for rank in find_cycle(rows, run)
        )
        raise DeadlockError(f"the order never finishes; {waits}")
    return fill_slots(schedule, run.start, order)


def _receives_wait(schedule: Schedule) -> list[NeedList]:
    """Let each receive wait for its send."""
    lookup, rank, ranks = find_rows(schedule), schedule.rows.rank_of_row(), schedule.num_ranks
    lists = []
    for receives, sends in (
        (lookup.receive_forward, lookup.send_forward),
        (lookup.receive_backward, lookup.send_backward),
    ):
        receive, send = receives[receives != ABSENT], sends[receives != ABSENT]
        if (lonely := receive[send == ABSENT]).size:
            at, position = schedule.rows.position(int(lonely[0]))
            raise ScheduleError(
                f"rank {at}, position {position}, {schedule.rows.action(int(lonely[0]))}: "
                "nobody sends what it receives"
            )
        lists.append(NeedList(receive, send, rank[send] * ranks + rank[receive]))
    return lists


def _format_pipeline_order(
    pipeline_order: Mapping[int, Sequence[_Action | None]], error_step_number: int | None = None
) -> str:
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


def _dump_chrometrace(
    schedule: Mapping[int, Sequence[_Action | None]], filename: Path | str
) -> None:
    """Write slots as a trace that Chrome and Perfetto open, a microsecond per slot."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.is_compute_op else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": slot,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for slot, action in enumerate(schedule[rank])
        if action is not None
    ]
    write_atomically(filename, json.dumps({"traceEvents": events}))
