"""Candidates: the ways in which the task can be trained, each with its prediction.

costs of the pieces -> the best cut for a placement -> costs of the stages -> an order -> Candidate
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import MemoryLimitError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.tools.demo.task import Task

__all__ = [
    "MESSAGE_HANDICAP",
    "DemoCandidate",
    "PlannedCandidate",
    "best_family",
    "family_candidate",
    "join_costs",
    "plan_candidate",
    "plan_candidates",
]

# How many times faster a schedule with twice as many messages must be. Costs that have the time of
# the host per action and message make this unnecessary.
MESSAGE_HANDICAP = 1.1


@dataclass(frozen=True)
class DemoCandidate:
    """A schedule, how many pieces each part of the model has, and the predicted timeline."""

    name: str
    schedule: Schedule
    sizes: tuple[int, ...]
    predicted: Timeline


@dataclass(frozen=True)
class PlannedCandidate:
    """A plan for a model that is cut into stages of these sizes."""

    plan: Plan
    sizes: tuple[int, ...]

    @property
    def candidate(self) -> DemoCandidate:
        """The plan as a candidate."""
        return DemoCandidate("the plan", self.plan.schedule, self.sizes, self.plan.timeline)


def family_candidate(name: str, task: Task, costs: Costs) -> DemoCandidate:
    """Return a family with the best cut for it; `costs` are those of the pieces."""
    schedule = build(name, ranks=task.ranks, microbatches=task.microbatches)
    flow = schedule.dataflow
    is_chain = flow == Dataflow.chain(schedule.num_stages)
    # If ranks share the parts of a model, every part is cut as if it had its own rank.
    placement = schedule.placement if is_chain else Placement.loop(flow.num_parts)
    sizes = _cut(task, costs, placement)
    predicted = simulate(schedule, join_costs(costs, sizes).for_parts(flow.parts))
    return DemoCandidate(schedule.name, schedule, sizes, predicted)


def best_family(task: Task, costs: Costs, *, memory: float) -> DemoCandidate | None:
    """Return the family that is predicted to be fastest of those that keep the memory limit."""
    found = []
    for name in FAMILIES:
        try:
            schedule = build(name, ranks=task.ranks, microbatches=task.microbatches)
        except SizeError:
            continue
        if schedule.is_forward_only or schedule.dataflow.num_parts > len(task.pieces):
            continue
        candidate = family_candidate(name, task, costs)
        if candidate.predicted.peak_bytes <= memory:
            found.append(candidate)
    return min(
        found,
        key=lambda one: _handicapped(one.predicted.end_time, one.schedule.placement),
        default=None,
    )


def plan_candidates(
    task: Task, costs: Costs, *, memory: float, seconds: float
) -> list[PlannedCandidate]:
    """Return a plan for every placement that keeps the memory limit, the fastest first.

    Two stages per rank mean twice as many messages, whose cost on the host is not part of the
    costs, so that such a plan must be clearly faster to come first.
    """
    ranks = task.ranks
    placements = (Placement.loop(ranks), Placement.loop(ranks, 2), Placement.v(ranks))
    found = []
    for placement in placements:
        if placement.num_stages > len(task.pieces):
            continue
        try:
            found.append(plan_candidate(task, costs, placement, memory=memory, seconds=seconds))
        except MemoryLimitError:
            continue
    return sorted(found, key=_seconds_with_messages)


def _seconds_with_messages(one: PlannedCandidate) -> float:
    return _handicapped(one.plan.seconds, one.plan.problem.placement)


def _handicapped(seconds: float, placement: Placement) -> float:
    is_one_each = placement.num_stages == placement.num_ranks
    return seconds * (1.0 if is_one_each else MESSAGE_HANDICAP)


def plan_candidate(
    task: Task,
    costs: Costs,
    placement: Placement,
    *,
    memory: float | None,
    seconds: float,
) -> PlannedCandidate:
    """Return the plan for the best cut of a placement; `costs` are those of the pieces."""
    sizes = _cut(task, costs, placement)
    found = plan(
        join_costs(costs, sizes),
        ranks=task.ranks,
        microbatches=task.microbatches,
        memory=memory,
        placement=placement,
        seconds=seconds,
    )
    return PlannedCandidate(found, sizes)


def join_costs(costs: Costs, sizes: Sequence[int]) -> Costs:
    """Return the costs of stages of these sizes, from those of the pieces.

    >>> join_costs(Costs(forward=[1, 2, 3], message_bytes=[0, 5, 7]), (1, 2)).forward
    (1.0, 5.0)
    """
    bounds = list(pairwise(np.cumsum([0, *sizes]).tolist()))
    changes: dict[str, Any] = {}
    for name, value in costs.to_mapping().items():
        if name != "transfer" and isinstance(value, tuple):
            changes[name] = [_join(name, value[begin:end]) for begin, end in bounds]
    return replace(costs, **changes)


def _join(name: str, values: Sequence[float]) -> float:
    """Return one cost of a stage: only its first piece receives, and it runs one at a time."""
    match name:
        case "message_bytes":
            return values[0]
        case "workspace_bytes":
            return max(values)
        case _:
            return sum(values)


def _cut(task: Task, costs: Costs, placement: Placement) -> tuple[int, ...]:
    """Return how many pieces each stage gets, so that the slowest stage is as fast as possible."""
    names = task.pieces
    columns = {
        name: costs.per_stage(name, len(names)).tolist()
        for name in ("forward", "backward_input", "backward_weight")
    }
    pieces = [
        Piece(piece, **{name: column[number] for name, column in columns.items()})
        for number, piece in enumerate(names)
    ]
    return partition(pieces, placement).sizes
