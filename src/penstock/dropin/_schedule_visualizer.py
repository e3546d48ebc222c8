"""Schedules as lists of actions with idle slots, and pictures of such lists.

    ops = get_schedule_ops("ZBVZeroBubble", 4, 8, add_spacing=True)
    visualize_schedule(ops, "zbv.png")

An action takes as many slots as its kind is wide, `None` is one. Torch is not needed.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from penstock.assembly import build, lower
from penstock.dropin.names.actions import _ComputationType, to_works
from penstock.dropin.names.lists import AnySlots, Order, Slots, list_actions
from penstock.dropin.names.passes import _defer_recv_ops
from penstock.dropin.orders.slots import (
    _ComputationTypeVisual,
    action_type_to_color_mapping,
    read_timeline,
    space,
)
from penstock.dropin.orders.tables import build_order
from penstock.errors import ArgumentError, SizeError
from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES, find_family
from penstock.view.figure import draw, save, show

__all__ = [
    "OpKey",
    "StagesPerRankError",
    "_ComputationTypeVisual",
    "action_type_to_color_mapping",
    "add_schedule_op_spacing",
    "get_schedule_ops",
    "visualize_schedule",
]


# The names of torch's own classes, which have a family here.
_TORCH_NAMES = {alias for family in FAMILIES.values() for alias in family.aliases}


class StagesPerRankError(SizeError, AssertionError):
    """A schedule has no such number of stages per rank; torch's users expect `AssertionError`."""


class OpKey(NamedTuple):
    """The identity of an operation."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int


def get_schedule_ops(
    schedule: str | type[Any],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[Slots]:
    """Return every rank's actions for a schedule, by its name or its class, without stages."""
    if add_spacing and with_comms:
        raise ArgumentError("spacing and communication exclude each other; ask for one of them")
    order, dataflow = _find(schedule, pp_degree, num_microbatches, num_stages_per_rank)
    if with_comms:
        return _lower(order, dataflow, defer_pp_recv)
    if add_spacing:
        works = map(to_works, order.values())
        return space(Schedule.from_orders(works, dataflow=dataflow))
    return list(order.values())


def _lower(order: Order, dataflow: Dataflow, defer_pp_recv: bool) -> list[Slots]:
    compute = [[a for a in slots if a and a.is_compute_op] for slots in order.values()]
    schedule = lower(Schedule.from_orders(map(to_works, compute), dataflow=dataflow))
    lowered = list_actions(schedule)
    if defer_pp_recv:
        lowered = _defer_recv_ops(lowered, schedule.placement.rank_of_stage.__getitem__)
    return [[*actions] for actions in lowered.values()]


def add_schedule_op_spacing(schedule: Sequence[AnySlots]) -> list[Slots]:
    """Put in idle slots (dropping others) so that every action starts after what it depends on."""
    works = [to_works(rank) for rank in schedule]
    return space(Schedule.from_orders(works)) if any(works) else [[] for _ in schedule]


def visualize_schedule(schedule: Sequence[AnySlots], filename: str | None = None) -> None:
    """Draw every rank's slots as they are listed; save the picture, or show it without a name."""
    figure = draw(read_timeline(schedule), title="", kinds=tuple(Kind))
    if filename is None:
        show(figure)
    else:
        save(figure, filename)


def _find(
    schedule: str | type[Any], ranks: int, microbatches: int, wanted: int | None
) -> tuple[Order, Dataflow]:
    """Return the order of a schedule and which stage feeds which, for stages that torch allows."""
    if isinstance(schedule, type) and schedule.__name__ not in _TORCH_NAMES:
        return _find_by_class(schedule, ranks, microbatches, wanted)
    family = find_family(schedule if isinstance(schedule, str) else schedule.__name__)
    stages = _choose_stages_per_rank(family.name, family.stages_per_rank, wanted)
    built = build(family.name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
    return build_order(family.name, ranks, microbatches, stages), built.dataflow


def _find_by_class(
    schedule: type[Any], ranks: int, microbatches: int, wanted: int | None
) -> tuple[Order, Dataflow]:
    """Return the order that the constructor of a user's schedule class makes of such stages."""
    bases = {base.__name__ for base in schedule.__mro__}
    if "_PipelineSchedule" not in bases:
        raise ArgumentError(f"{schedule.__name__} is not a schedule; derive it from one")
    is_single = "PipelineScheduleSingle" in bases
    per_rank = _choose_stages_per_rank(schedule.__name__, 1 if is_single else 2, wanted)
    # As much of a stage as a schedule's constructor reads.
    known = {"num_stages": ranks * per_rank, "group_size": ranks, "group_rank": 0}
    stages = [SimpleNamespace(**known, group=None, submod=None) for _ in range(per_rank)]
    made = schedule(stages[0] if is_single else stages, microbatches)
    if not made.pipeline_order:
        raise ArgumentError(f"{schedule.__name__} sets no pipeline_order to show")
    order = {rank: list(made.pipeline_order[rank]) for rank in range(ranks)}
    return order, Dataflow.chain(ranks * per_rank)


def _choose_stages_per_rank(name: str, usual: int, wanted: int | None) -> int:
    if wanted is not None and (wanted < usual or usual == 1 != wanted):
        bound = "exactly" if usual == 1 else "at least"
        raise StagesPerRankError(
            f"{name} takes {bound} {usual} stage{'s' * (usual > 1)} per rank "
            f"(num_stages_per_rank: {wanted})"
        )
    return usual if wanted is None else wanted
