"""A plan: a schedule with what it is predicted to take, and the least that any could take."""

from dataclasses import dataclass
from functools import cached_property

from penstock.ir.schedule import Schedule
from penstock.planner.problem import Problem
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """A schedule that solves a problem, and a proven bound: no schedule for it is faster."""

    problem: Problem
    schedule: Schedule
    lower_bound: float

    @cached_property
    def timeline(self) -> Timeline:
        """What is predicted: the schedule, simulated with the costs of the problem."""
        return simulate(self.schedule, self.problem.costs)

    @property
    def gap(self) -> float:
        """How much slower the schedule is than the bound, as a share of the bound."""
        return self.timeline.makespan / self.lower_bound - 1 if self.lower_bound else 0.0
