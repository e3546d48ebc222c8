"""Schedules as lists of actions with idle slots, and pictures of such lists.

    ops = get_schedule_ops("ZBVZeroBubble", 4, 8, add_spacing=True)
    visualize_schedule(ops, "zbv.png")

A list per rank; an action stands once and takes as many slots as its kind is wide, `None` is one
idle slot. Torch is not needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import DeadlockError, SizeError
from penstock.ir.actions import Action, Kind, Overlap, Work
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES, Family, Generator, find_family
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.figure import draw, save, show
from penstock.view.palette import LOOKS

__all__ = [
    "OpKey",
    "_ComputationTypeVisual",
    "action_type_to_color_mapping",
    "add_schedule_op_spacing",
    "get_schedule_ops",
    "visualize_schedule",
]

Slots: TypeAlias = list[Work | None]


class OpKey(NamedTuple):
    """The identity of an operation."""

    stage_index: int
    computation_type: Kind
    microbatch_index: int


@dataclass(frozen=True, slots=True)
class _ComputationTypeVisual:
    """How a kind is drawn: its colour, its name and its width in slots."""

    color: str
    text: str = ""
    width: int = 1


action_type_to_color_mapping = {
    kind: _ComputationTypeVisual(look.colour, look.label, 2 if kind is Kind.FULL_BACKWARD else 1)
    for kind, look in LOOKS.items()
}


def get_schedule_ops(
    schedule: str | Generator,
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[Slots]:
    """Every rank's actions for a schedule, given by its name or by the function that makes it.

    Schedules of one stage per rank take no other number; the others take two unless told, and
    not less. `defer_pp_recv` puts receives late instead of early, where there are any.
    """
    if add_spacing and with_comms:
        raise ValueError("spacing and communication exclude each other; ask for one of them")
    stages = _choose_stages_per_rank(schedule, num_stages_per_rank)
    built = build(schedule, ranks=pp_degree, microbatches=num_microbatches, stages_per_rank=stages)
    if add_spacing:
        return _add_spacing(built)
    if with_comms:
        built = lower(built, receives="late" if defer_pp_recv else "early")
    return [list(order) for order in built.orders]


def add_schedule_op_spacing(schedule: Sequence[Sequence[Work | None]]) -> list[Slots]:
    """Put in idle slots so that every action starts after what it depends on.

    Idle slots that are already there are dropped first. Afterwards every rank fills the same
    number of slots. The stages form a chain.
    """
    if not any(_drop_idle(rank) for rank in schedule):
        return [list(rank) for rank in schedule]
    return _add_spacing(Schedule.from_orders(map(_drop_idle, schedule)))


def visualize_schedule(
    schedule: Sequence[Sequence[Work | None]], filename: str | None = None
) -> None:
    """Draw every rank's slots as they are listed; save the picture, or show it without a name."""
    figure = draw(_read_timeline(schedule), title="", kinds=tuple(Kind))
    if filename is None:
        show(figure)
    else:
        save(figure, filename)


def _choose_stages_per_rank(schedule: str | Generator, wanted: int | None) -> int | None:
    """The number of stages per rank, checked against what torch allows for this family."""
    family = find_family(schedule) if isinstance(schedule, str) else _find_by_function(schedule)
    if family is None:
        return wanted
    usual = family.stages_per_rank
    if wanted is not None and (wanted < usual or usual == 1 != wanted):
        bound = "exactly" if usual == 1 else "at least"
        raise SizeError(
            f"{family.name} takes {bound} {usual} stage{'s' * (usual > 1)} per rank "
            f"(num_stages_per_rank: {wanted})"
        )
    return usual if wanted is None else wanted


def _find_by_function(generate: Generator) -> Family | None:
    return next((family for family in FAMILIES.values() if family.generate is generate), None)


def _add_spacing(schedule: Schedule) -> list[Slots]:
    widths = {kind: visual.width for kind, visual in action_type_to_color_mapping.items()}
    costs = Costs(
        forward=widths[Kind.FORWARD],
        backward_input=widths[Kind.BACKWARD_INPUT],
        backward_weight=widths[Kind.BACKWARD_WEIGHT],
        full_backward=widths[Kind.FULL_BACKWARD],
    )
    try:
        timeline = simulate(schedule, costs)
    except DeadlockError as error:
        raise RuntimeError(f"deadlock: {error}") from error
    num_slots = int(timeline.end.max())
    return [_space_rank(timeline, rank, num_slots) for rank in range(schedule.num_ranks)]


def _space_rank(timeline: Timeline, rank: int, num_slots: int) -> Slots:
    """One rank's actions with an idle slot for every unit of time in which it does nothing."""
    rows = timeline.schedule.rows
    here = slice(int(rows.first[rank]), int(rows.first[rank + 1]))
    starts = timeline.start[here][~rows.joined[here]].astype(int).tolist()
    slots: Slots = []
    clock = 0
    for work, start in zip(rows.works(rank), starts, strict=True):
        slots += [None] * (start - clock)
        slots.append(work)
        clock = start + _width(work)
    return slots + [None] * (num_slots - clock)


def _read_timeline(schedule: Sequence[Sequence[Work | None]]) -> Timeline:
    """The times that a list of slots stands for: each entry begins where the one before ends."""
    starts, ends = [], []
    for rank in schedule:
        clock = 0
        for entry in rank:
            for _ in _actions(entry) if entry is not None else ():
                starts.append(clock)
                ends.append(clock + _width(entry))
            clock += _width(entry)
    start, end = np.array(starts, dtype=np.float64), np.array(ends, dtype=np.float64)
    return Timeline(Schedule.from_orders(map(_drop_idle, schedule)), start, end, 0 * start)


def _drop_idle(rank: Sequence[Work | None]) -> list[Work]:
    return [entry for entry in rank if entry is not None]


def _actions(work: Work) -> tuple[Action, ...]:
    return work.actions if isinstance(work, Overlap) else (work,)


def _width(entry: Work | None) -> int:
    """How many slots an entry takes; an overlap takes those of all its actions."""
    if entry is None:
        return 1
    return sum(action_type_to_color_mapping[action.kind].width for action in _actions(entry))
