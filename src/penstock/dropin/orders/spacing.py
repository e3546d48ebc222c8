"""How many slots each kind of action takes, and when it starts if every rank runs in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.dropin.names.actions import (
    OVERLAP_F_B,
    WAITS,
    _Action,
    _ComputationType,
    to_works,
)
from penstock.dropin.names.lists import Slots, members, to_actions
from penstock.errors import DeadlockError
from penstock.ir.actions import Kind
from penstock.ir.clock import find_cycle, run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.sim.timeline import Timeline
from penstock.view.palette import BORDER, LOOKS

__all__ = [
    "SlotsDeadlockError",
    "_ComputationTypeVisual",
    "action_type_to_color_mapping",
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


def _visual(kind: Kind) -> _ComputationTypeVisual:
    look = LOOKS[kind]
    return _ComputationTypeVisual(look.colour, look.label, 1 + (kind is Kind.FULL_BACKWARD))


action_type_to_color_mapping = {
    **{_ComputationType[kind.name]: _visual(kind) for kind in Kind},
    OVERLAP_F_B: _ComputationTypeVisual(BORDER, "Overlapped", 3),
    **{wait: _ComputationTypeVisual(BORDER, "Wait") for wait in WAITS},
}


def space(schedule: Schedule) -> list[Slots]:
    """Return every rank's actions, each in a slot after those of what it depends on.

    Afterwards every rank fills the same number of slots.
    """
    rows, graph = schedule.rows, build_graph(schedule)
    width = _widths(schedule)
    run = run_in_order(rows, graph, duration=width, busy=width, lag=np.zeros(len(graph.need)))
    if not run.is_finished:
        ranks = ", ".join(map(str, find_cycle(rows, run)))
        raise SlotsDeadlockError(f"deadlock: ranks {ranks} wait for one another; check the order")
    num_slots = int((run.start + width).max())
    return [_space_rank(schedule, run.start, rank, num_slots) for rank in range(rows.num_ranks)]


def _widths(schedule: Schedule) -> Floats:
    """Return how many slots each row takes; each member of an overlap takes those of all."""
    visuals = (action_type_to_color_mapping[_ComputationType[kind.name]] for kind in Kind)
    alone = np.array([visual.width for visual in visuals], dtype=np.float64)[schedule.rows.kind]
    opening = schedule.rows.opening_row()
    return np.bincount(opening, weights=alone)[opening].astype(np.float64)


def _space_rank(schedule: Schedule, start: Floats, rank: int, num_slots: int) -> Slots:
    """Return one rank's actions, with an idle slot for every unit of idle time."""
    rows = schedule.rows
    here = slice(int(rows.first[rank]), int(rows.first[rank + 1]))
    starts = start[here][~rows.joined[here]].astype(int).tolist()
    slots: Slots = []
    clock = 0
    for action, begin in zip(to_actions(rows, rank), starts, strict=True):
        slots += [None] * (begin - clock)
        slots.append(action)
        clock = begin + _width(action)
    return slots + [None] * (num_slots - clock)


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


def _width(entry: _Action | None) -> int:
    """Return how many slots an entry takes; an overlap takes those of all its actions."""
    if entry is None:
        return 1
    kinds = (member.computation_type for member in members(entry))
    return sum(action_type_to_color_mapping[kind].width for kind in kinds)
