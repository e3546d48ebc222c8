"""Whole backwards where splitting them gains nothing."""

from dataclasses import replace

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.rows import Bools
from penstock.ir.schedule import Schedule
from penstock.passes.backward import find_pairs, merge_backward, merge_pairs
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate

__all__ = ["make_whole", "merge_for_free", "with_whole_backwards"]


def merge_for_free(schedule: Schedule, problem: SchedulingProblem) -> Schedule:
    """Merge each I with a W right after it into one B, where that makes nothing slower.

    Where B takes less than I and W together, all such pairs are merged if that is faster still.
    """
    choices = [schedule, merge_pairs(schedule, _find_free(schedule, problem))]
    if problem.costs.full_backward is not None or problem.costs.host_action:
        choices.append(merge_backward(schedule))
    # The last of equals has the fewest actions.
    return min(reversed(choices), key=lambda choice: _seconds(choice, problem))


def _seconds(schedule: Schedule, problem: SchedulingProblem) -> float:
    return simulate(schedule, problem.costs).period(problem.boundary)


def _find_free(schedule: Schedule, problem: SchedulingProblem) -> Bools:
    """Return, for every row, whether it is an I that may as well be a B.

    B passes its gradient on only when it ends, so the stage before must not need it sooner.
    """
    rows, timeline = schedule.rows, simulate(schedule, problem.costs.without_collectives())
    needed = np.full((problem.stages + 1, problem.microbatches), np.inf)
    backward = np.flatnonzero(rows.is_kind(Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD))
    needed[rows.stage[backward] + 1, rows.microbatch[backward]] = timeline.start[backward]
    lag = np.concatenate(([0.0], problem.lags_of_size_one[1]))
    is_free = find_pairs(rows) & _is_no_longer(problem)[rows.stage]
    pairs = np.flatnonzero(is_free)
    stage, microbatch = rows.stage[pairs], rows.microbatch[pairs]
    is_free[pairs] = needed[stage, microbatch] >= (
        timeline.end[pairs + 1] + lag[stage] * problem.scales[microbatch]
    )
    return is_free


def _is_no_longer(problem: SchedulingProblem) -> Bools:
    """Return, per stage, whether B takes no longer than I and W."""
    if problem.costs.full_backward is None:
        return np.ones(problem.stages, dtype=np.bool_)
    parts = problem.backward_input_each + problem.backward_weight_each
    is_no_longer: Bools = np.all(problem.full_backward_each <= parts, axis=1)
    return is_no_longer


def with_whole_backwards(problem: SchedulingProblem) -> SchedulingProblem | None:
    """Return the problem with whole backwards, or None if splitting never costs anything.

    In it, I does everything, and W takes no time and holds nothing.
    """
    costs, stages = problem.costs, problem.stages
    whole = np.array([costs.full_backward_seconds(stage) for stage in range(stages)])
    parts = sum(costs.per_stage(f"backward_{half}", stages) for half in ("input", "weight"))
    if (
        (whole >= parts).all()
        and not costs.host_action
        and (problem.stash <= problem.activation).all()
    ):
        return None
    unsplit = replace(
        costs,
        backward_input=tuple(whole.tolist()),
        backward_weight=0.0,
        full_backward=None,
        weight_stash_bytes=0.0,
    )
    return replace(problem, costs=unsplit)


def make_whole(schedule: Schedule) -> Schedule:
    """Make every backward whole, in the place of its I; W is dropped."""
    rows = schedule.rows
    kind = np.where(rows.is_kind(Kind.BACKWARD_INPUT), np.int8(Kind.FULL_BACKWARD), rows.kind)
    kept = replace(rows, kind=kind).keep(~rows.is_kind(Kind.BACKWARD_WEIGHT))
    return replace(schedule, rows=kept)
