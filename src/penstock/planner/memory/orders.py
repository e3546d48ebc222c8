"""Orders to fit into a limit: solutions of problems that leave out the bytes that will give way.

kept by a microbatch    F         I      W
as it is                |== 1 ====|- s --|      under this limit, and under larger ones
offloaded               |         |- s --|      with room for those that are worked on or copied
recomputed              |- i -----|- s --|      with a longer I, and room for one that is whole

These problems have no memory actions, so the solver for orders solves them. Only the order is
taken from a solution: what is recomputed or offloaded in it is decided for the real limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from penstock.ir.actions import Kind
from penstock.ir.rows import Bools, Floats
from penstock.ir.schedule import Schedule
from penstock.passes.backward import split_backward
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

__all__ = ["OrderFinder"]

# Orders are found for limits this many times as large as the real one.
_RELAXED = (1.0, 1.5, 2.5, inf)
# What stays of an activation that is offloaded, and how many are whole beside these.
_OFFLOADED = ((0.0, 1.0), (0.0, 2.0), (0.5, 1.0))
# The shares of the ranks, from the first on, that recompute all of their stages.
_RECOMPUTED = (0.25, 0.5, 0.75, 1.0)
_MOST_EASIER = len(_RELAXED) + len(_OFFLOADED) + len(_RECOMPUTED)


@dataclass(slots=True)
class OrderFinder:
    """Finds orders for a problem; what was solved for some means is not solved again for others.

    `effort` is that for every easier problem, or `seconds` are those for all of them.
    """

    problem: SchedulingProblem
    effort: float | None
    seconds: float
    is_cut_short: bool = False
    _solved: dict[SchedulingProblem, Schedule] = field(default_factory=dict)

    def find(self, means: frozenset[Kind]) -> list[Timeline]:
        """Return runs of orders that keep everything and suit some means, the fastest first."""
        problem = self.problem
        easier = [one for one in _easier(problem, means) if (one.missing_bytes <= 0).all()]
        found = list(fixed_schedules(problem.without_limit))
        found += [self._solve(one) for one in easier]
        found += [split_backward(schedule) for schedule in found]
        timelines = [simulate(schedule, problem.costs) for schedule in dict.fromkeys(found)]
        return sorted(timelines, key=lambda run: run.period(problem.boundary))

    def _solve(self, easier: SchedulingProblem) -> Schedule:
        if easier not in self._solved:
            seconds = self.seconds / _MOST_EASIER
            plan = solve(easier, seconds=seconds, effort=self.effort)
            self.is_cut_short |= plan.is_cut_short
            self._solved[easier] = plan.schedule
        return self._solved[easier]


def _easier(problem: SchedulingProblem, means: frozenset[Kind]) -> Iterator[SchedulingProblem]:
    """Yield problems whose orders are worth fitting by some means; some may have no solution."""
    resident, capacity = problem.resident, problem.capacity
    for factor in _RELAXED:
        yield replace(problem, memory=_tuple(resident + factor * capacity))
    if Kind.OFFLOAD in means:
        for share, whole in _OFFLOADED:
            yield _offloading(problem, share, whole)
    inputs = problem.costs.saved_input_bytes(problem.stages)
    taken = problem.costs.per_stage("activation_bytes", problem.stages)
    if Kind.RECOMPUTE in means and (inputs < taken).any():
        for share in _RECOMPUTED:
            yield _recomputing(problem, ceil(share * problem.ranks))


def _offloading(problem: SchedulingProblem, share: float, whole: float) -> SchedulingProblem:
    """Return the problem in which a share of every activation is held, and some are whole."""
    taken = problem.costs.per_stage("activation_bytes", problem.stages)
    costs = replace(problem.costs, activation_bytes=_tuple(share * taken))
    reserve = whole * _largest(problem, (1 - share) * taken)
    return replace(problem, costs=costs, memory=_tuple(np.array(problem.memory) - reserve))


def _recomputing(problem: SchedulingProblem, ranks: int) -> SchedulingProblem:
    """Return the problem in which the first ranks recompute all their stages."""
    stages, old = problem.stages, problem.costs
    chosen: Bools = np.array(problem.placement.rank_of_stage) < ranks
    again = np.where(chosen, old.recompute_seconds(stages), 0.0)
    taken = old.per_stage("activation_bytes", stages)
    held = np.where(chosen, old.saved_input_bytes(stages), taken)
    full = None if old.full_backward is None else old.per_stage("full_backward", stages) + again
    costs = replace(
        old,
        backward_input=_tuple(old.per_stage("backward_input", stages) + again),
        full_backward=None if full is None else _tuple(full),
        activation_bytes=_tuple(held),
    )
    reserve = _largest(problem, taken - held)
    return replace(problem, costs=costs, memory=_tuple(np.array(problem.memory) - reserve))


def _largest(problem: SchedulingProblem, per_stage: Floats) -> Floats:
    """Return, per rank, the largest of its stages' bytes, for the largest microbatch."""
    largest = np.zeros(problem.ranks)
    np.maximum.at(largest, np.array(problem.placement.rank_of_stage), per_stage)
    scaled: Floats = largest * problem.scales.max()
    return scaled


def _tuple(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())
