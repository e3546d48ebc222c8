"""Conversion between schedules and solutions of a constraint model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.actions import COMPUTE_KINDS, Action, Kind
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.planner.exact.model import Interval, ScheduleModel
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import LinearExprT

__all__ = ["add_hints", "read_schedule"]


def add_hints(filled: ScheduleModel, schedule: Schedule) -> None:
    """Start the search at a schedule: its start times in ticks solve the model.

    Microbatches of equal size are renamed so that they keep their order. A stage that has some B
    and some I is left to the search.
    """
    timeline = simulate(schedule, filled.problem.costs.without_collectives())
    for stage in range(filled.problem.stages):
        forward, backward, weight, full = (
            _starts(timeline, stage, kind, is_even=filled.problem.is_even)
            for kind in COMPUTE_KINDS
        )
        if len(full) and not len(backward):
            backward, weight = full, full + filled.problem.backward_input_each[stage]
        _hint(filled, filled.forward[stage], forward)
        _hint(filled, filled.backward[stage], backward)
        _hint(filled, filled.weight[stage], weight)
        for choice in filled.is_merged.get(stage, ()):
            filled.model.add_hint(choice, len(full) > 0)


def _starts(timeline: Timeline, stage: int, kind: Kind, *, is_even: bool) -> Floats:
    """Return the starts of a stage's actions in the order of the microbatches."""
    rows = timeline.schedule.rows
    mine = np.flatnonzero((rows.stage == stage) & (rows.kind == kind))
    by_name = timeline.start[mine[np.argsort(rows.microbatch[mine])]]
    return np.sort(by_name) if is_even else by_name


def _hint(filled: ScheduleModel, pieces: tuple[Interval, ...], starts: Floats) -> None:
    if len(starts) == len(pieces):
        for piece, start in zip(pieces, starts, strict=True):
            filled.model.add_hint(piece.start, filled.ticks.down(start))


def read_schedule(
    filled: ScheduleModel,
    value: Callable[[LinearExprT], int],
    more: Iterable[tuple[int, int, Action]] = (),
) -> Schedule:
    """Return the schedule of a solution: every rank's actions in the order of their times.

    `more` are actions that are not among those of the model, with their times.
    """
    holder = filled.problem.placement.rank_of_stage
    others = list(more)
    orders = []
    for rank in range(filled.problem.ranks):
        timed = [entry for entry in others if holder[entry[2].stage] == rank]
        for stage in filled.problem.placement.stages(rank):
            timed += _timed_actions(filled, value, stage)
        # An action without length comes before one that starts when it ends.
        timed.sort(key=lambda entry: entry[:2])
        orders.append([action for *_, action in timed])
    return Schedule.from_orders(orders, name="exact")


def _timed_actions(
    filled: ScheduleModel, value: Callable[[LinearExprT], int], stage: int
) -> list[tuple[int, int, Action]]:
    merged = {
        number for number, choice in enumerate(filled.is_merged.get(stage, ())) if value(choice)
    }
    timed = []
    for kind, actions in (
        (Kind.FORWARD, filled.forward),
        (Kind.BACKWARD_INPUT, filled.backward),
        (Kind.BACKWARD_WEIGHT, filled.weight),
    ):
        for number, piece in enumerate(actions[stage]):
            name = kind
            if number in merged and kind != Kind.FORWARD:
                if kind == Kind.BACKWARD_WEIGHT:
                    continue
                name = Kind.FULL_BACKWARD
            timed.append((value(piece.start), value(piece.end), Action(name, stage, number)))
    return timed
