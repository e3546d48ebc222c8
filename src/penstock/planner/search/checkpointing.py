"""Activation checkpointing of stages: fewer bytes held, one forward more.

A checkpointed stage holds what it took in, and nothing else, until its backward; that runs the
forward again, and needs room for the activations while it does. Its backward is not split, as it
is when a `Pipeline` runs the plan: I does all of it, and W nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from penstock.costs import Costs
from penstock.ir.rows import Floats
from penstock.planner.problem import SchedulingProblem

__all__ = ["checkpoint", "fewest_checkpoints", "is_worth_checkpointing"]


def checkpoint(costs: Costs, stages: Collection[int], num_stages: int) -> Costs:
    """Return the costs of a model with these stages checkpointed.

    What a stage takes in is its `message_bytes`; for the first that is a piece of the batch.

    >>> plain = Costs(forward=[1, 1], activation_bytes=[10, 10], message_bytes=[2, 2])
    >>> found = checkpoint(plain, [0], 2)
    >>> found.backward_input, found.backward_weight
    ((3.0, 1.0), (0.0, 1.0))
    >>> found.activation_bytes, found.workspace_bytes
    ((2.0, 10.0), (8.0, 0.0))
    """
    chosen = np.isin(np.arange(num_stages), list(stages))
    if not chosen.any():
        return costs

    def column(name: str) -> Floats:
        return costs.per_stage(name, num_stages)

    again = np.where(chosen, column("forward"), 0.0)
    weights = np.where(chosen, column("backward_weight"), 0.0)
    kept = np.minimum(column("message_bytes"), column("activation_bytes"))
    held = np.where(chosen, kept, column("activation_bytes"))
    full = None if costs.full_backward is None else _tuple(column("full_backward") + again)
    return replace(
        costs,
        backward_input=_tuple(column("backward_input") + weights + again),
        backward_weight=_tuple(column("backward_weight") - weights),
        full_backward=full,
        activation_bytes=_tuple(held),
        weight_stash_bytes=_tuple(np.where(chosen, 0.0, column("weight_stash_bytes"))),
        workspace_bytes=_tuple(column("workspace_bytes") + column("activation_bytes") - held),
    )


def is_worth_checkpointing(costs: Costs, num_stages: int) -> bool:
    """Return whether checkpoints are known to hold less than activations."""
    message = costs.per_stage("message_bytes", num_stages)
    activation = costs.per_stage("activation_bytes", num_stages)
    return bool(message.any() and (message < activation).any())


def fewest_checkpoints(problem: SchedulingProblem, in_flight: Sequence[int]) -> tuple[int, ...]:
    """Return the fewest stages to checkpoint so that these microbatches in flight fit.

    On every rank the stages with most bytes saved per second of recomputation go first, until
    what is left fits; where nothing is enough, all of them go.
    """
    chosen = [
        stage
        for rank in range(problem.ranks)
        for stage in _fewest_on_rank(problem, rank, in_flight)
    ]
    return tuple(sorted(chosen))


def _fewest_on_rank(problem: SchedulingProblem, rank: int, in_flight: Sequence[int]) -> list[int]:
    stages = sorted(
        problem.placement.stages(rank), key=lambda stage: -_worth(problem, stage, in_flight)
    )
    for count in range(len(stages)):
        if _held(problem, rank, stages[:count], in_flight) <= problem.memory[rank]:
            return stages[:count]
    return stages


def _worth(problem: SchedulingProblem, stage: int, in_flight: Sequence[int]) -> float:
    """Return the bytes saved per second of recomputation."""
    message = problem.costs.per_stage("message_bytes", problem.stages)[stage]
    saved = in_flight[stage] * (problem.activation[stage] - message)
    seconds = float(problem.costs.per_stage("forward", problem.stages)[stage])
    return float(saved) / seconds if seconds else float("inf")


def _held(
    problem: SchedulingProblem, rank: int, chosen: Sequence[int], in_flight: Sequence[int]
) -> float:
    """Return the bytes of a rank with these stages checkpointed and microbatches in flight."""
    costs = checkpoint(problem.costs, chosen, problem.stages)
    changed = replace(problem, costs=costs)
    in_flight_bytes = np.array(in_flight) * np.maximum(changed.activation, changed.stash)
    return float(
        changed.resident[rank] + in_flight_bytes[list(problem.placement.stages(rank))].sum()
    )


def _tuple(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())
