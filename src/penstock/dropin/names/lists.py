"""Orders as torch's users hold them, a list of actions per rank, as a `Schedule` and back.

Such lists may hold idle slots. So every rank gets one stage more than the model has, which nothing
flows through: `num_stages` plus the rank. An idle slot is a RESHARD of that stage.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock.atomic_files import write_atomically
from penstock.dropin.names.actions import (
    RESHARD,
    ActionTextError,
    _Action,
    from_work,
    to_works,
)
from penstock.errors import ArgumentError, ParseError, ScheduleError
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.text import parse_cells
from penstock.untrusted import read_text

__all__ = [
    "AnyOrder",
    "AnySlots",
    "Order",
    "OrderError",
    "Slots",
    "apply_to_rank",
    "from_schedule",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "list_actions",
    "make_schedule",
    "members",
    "read_order",
    "read_stage_ranks",
    "to_actions",
    "to_rows",
    "to_schedule",
    "write_order",
]

Slots: TypeAlias = list[_Action | None]
Order: TypeAlias = dict[int, Slots]
# The same to read only, with idle slots or without.
AnySlots: TypeAlias = Sequence[_Action | None]
AnyOrder: TypeAlias = Mapping[int, AnySlots]


class OrderError(ScheduleError, AssertionError):
    """An order breaks a rule; also an `AssertionError`, which torch's users expect here."""


def members(action: _Action) -> tuple[_Action, ...]:
    """Return the actions that run together in an overlap, or the action itself."""
    return (action,) if action.sub_actions is None else action.sub_actions


def read_stage_ranks(order: AnyOrder) -> dict[int, int]:
    """Return the rank that holds each stage, as the actions of an order say."""
    holder: dict[int, int] = {}
    for rank in sorted(order):
        for position, action in enumerate(order[rank]):
            for member in members(action) if action is not None else ():
                other = holder.setdefault(member.stage_index, rank)
                if other != rank:
                    raise OrderError(
                        f"rank {rank}, position {position}, {action}: stage "
                        f"{member.stage_index} also runs on rank {other}; give it to one of them"
                    )
    return dict(sorted(holder.items()))


def to_rows(lists: Iterable[AnySlots]) -> Rows:
    """Return the rows of every rank's list, without idle slots."""
    return Rows.from_works([to_works(actions) for actions in lists])


def to_actions(rows: Rows, rank: int) -> Iterator[_Action]:
    """Yield one rank's rows as actions."""
    return map(from_work, rows.works(rank))


def list_actions(schedule: Schedule) -> dict[int, list[_Action]]:
    """Return every rank's list of a schedule."""
    return {rank: list(to_actions(schedule.rows, rank)) for rank in range(schedule.num_ranks)}


def make_schedule(
    order: AnyOrder,
    holder: Mapping[int, int],
    microbatches: int,
    edges: Sequence[tuple[int, int]] | None = None,
) -> Schedule:
    """Return a whole schedule with this order, over a chain of stages unless edges are given."""
    _check_places(order, holder)
    rows = to_rows([order[rank] for rank in sorted(order)])
    placement = Placement(tuple(holder[stage] for stage in sorted(holder)))
    flow = Dataflow.chain(len(holder)) if edges is None else Dataflow(len(holder), edges)
    return Schedule(rows, placement, flow, microbatches)


def to_schedule(order: AnyOrder, stage_to_rank: Callable[[int], int], num_stages: int) -> Schedule:
    """Return the schedule of a chain of stages with this order, the ranks in rising order."""
    number = {rank: place for place, rank in enumerate(sorted(order))}
    holder = {stage: stage_to_rank(stage) for stage in range(num_stages)}
    _check_places(order, holder)
    idle = {rank: _Action(num_stages + place, RESHARD) for rank, place in number.items()}
    rows = to_rows([action or idle[rank] for action in order[rank]] for rank in number)
    placement = Placement((*(number[rank] for rank in holder.values()), *number.values()))
    dataflow = Dataflow(placement.num_stages, Dataflow.chain(num_stages).edges)
    return Schedule(rows, placement, dataflow, int(rows.microbatch.max(initial=0)) + 1)


def from_schedule(schedule: Schedule, ranks: Iterable[int]) -> dict[int, list[_Action]]:
    """Return the lists of a schedule from `to_schedule` or of a pass over it, without idle."""
    num_stages = schedule.num_stages - schedule.num_ranks
    order = {}
    for number, rank in enumerate(sorted(ranks)):
        actions = to_actions(schedule.rows, number)
        order[rank] = [action for action in actions if action.stage_index < num_stages]
    return order


def apply_to_rank(change: Callable[[Schedule], Schedule], actions: AnySlots) -> list[_Action]:
    """Apply a pass to one rank's list alone; idle slots are dropped."""
    rows = to_rows([actions])
    if not len(rows):
        return []
    # Any stage may be missing here, but a schedule counts them without gaps.
    stages, number = np.unique(rows.stage, return_inverse=True)
    numbered = replace(rows, stage=number.astype(np.int32))
    place, flow = Placement((0,) * len(stages)), Dataflow(len(stages), ())
    schedule = Schedule(numbered, place, flow, int(rows.microbatch.max()) + 1)
    changed = change(schedule).rows
    return list(to_actions(replace(changed, stage=stages[changed.stage]), 0))


def _check_places(order: AnyOrder, holder: Mapping[int, int]) -> None:
    for stage, rank in read_stage_ranks(order).items():
        if stage not in holder:
            raise OrderError(f"stage {stage} on rank {rank} must be below {len(holder)}")
        if holder[stage] != rank:
            raise OrderError(f"stage {stage} must run on rank {holder[stage]} (got {rank})")
    for stage, rank in holder.items():
        if rank not in order:
            raise OrderError(f"stage {stage} belongs to rank {rank}, which has no list here")


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """Return the rank of each stage: round-robin ("loop"), or down the ranks and back ("v")."""
    if style == "loop":
        return {stage: stage % pp_size for stage in range(num_stages)}
    if style != "v":
        raise ArgumentError(f'stages are placed in style "loop" or "v" (got {style!r})')
    if num_stages % pp_size:
        raise ArgumentError(
            f"a v places the same number of stages on every rank (stages: {num_stages}, "
            f"ranks: {pp_size}); use a multiple of {pp_size} stages"
        )
    return dict(enumerate(Placement.v(pp_size, num_stages // pp_size).rank_of_stage))


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """Return the stages that each rank holds, in rising order."""
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages


def write_order(order: AnyOrder, filename: Path | str) -> None:
    """Write a CSV file: a row per rank, a cell per action, and an empty cell for an idle slot."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(order.values())
    write_atomically(filename, text.getvalue())


def read_order(filename: Path | str) -> Order:
    """Read an order, one row per rank from rank 0; empty lines at the end are ignored."""
    try:
        rows = parse_cells(read_text(Path(filename)).rstrip("\r\n"), _Action.from_str)
    except ParseError as error:
        raise ActionTextError(f"{filename}: {error}") from error
    return dict(enumerate(rows))
