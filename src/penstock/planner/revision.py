"""Revise a plan with the recorded costs of its steps: is another order faster now?"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.costs import Costs
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.memory.planning import plan_memory
from penstock.planner.order.solver import Progress, solve
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.breakdown import break_down
from penstock.sim.period import name_seconds
from penstock.sim.recorded.costs_of_timeline import costs_of
from penstock.sim.recorded.review import review
from penstock.sim.timeline import Timeline
from penstock.units import format_share

__all__ = ["Revision", "revise", "update"]


@dataclass(frozen=True, slots=True)
class Revision:
    """The old order at recorded costs, and a new plan for the same costs and limits.

    The new one is offered if it is predicted to save more than `least_gain` of a step.
    """

    old: Plan
    new: Plan
    least_gain: float

    @property
    def gain(self) -> float:
        """The share of a step that the new plan is predicted to save."""
        before = self.old.seconds
        return 1 - self.new.seconds / before if before else 0.0

    @property
    def is_offered(self) -> bool:
        """Whether the new plan is worth the change."""
        return self.gain > self.least_gain

    @property
    def best(self) -> Plan:
        """The plan to use from now on."""
        return self.new if self.is_offered else self.old

    @property
    def imbalance(self) -> float:
        """The seconds by which the busiest rank computes more than the average.

        No order changes that: another cut of the model may save up to this much.
        """
        return break_down(self.best).imbalance

    @property
    def remark(self) -> str:
        """Advice to cut the model again, if uneven ranks cost more than `least_gain`."""
        if self.imbalance <= self.least_gain * self.best.seconds:
            return ""
        busy = self.best.timeline.busy_seconds
        return (
            f"rank {busy.index(max(busy))} computes {self.imbalance:.4g} s more than the average; "
            "another cut may save up to that, see penstock.partition and penstock.search"
        )

    def __str__(self) -> str:
        advice = "run the new plan" if self.is_offered else "keep the old one"
        name = name_seconds(self.old.problem.boundary)
        return (
            f"at the recorded costs the old order takes {self.old.seconds:.4g} s ({name}) and a "
            f"new one {self.new.seconds:.4g} s, {format_share(self.gain)} less: {advice}"
        )


def update(plan: Plan, recorded: Timeline, *more: Timeline) -> Costs:
    """Return the costs of a plan, with the seconds of its recorded steps."""
    for step in (recorded, *more):
        review(plan.timeline, step)
    return costs_of(recorded, *more, like=plan.problem.costs)


def revise(
    plan: Plan,
    recorded: Timeline,
    *more: Timeline,
    seconds: float = 5.0,
    least_gain: float = 0.02,
    progress: Callable[[Progress], None] | None = None,
) -> Revision:
    """Solve a plan's problem again, at the costs of its recorded steps.

    A plan that recomputes or offloads is revised by `plan_memory`, without `progress`. Several
    steps give better costs than one. The bytes stay those of the plan; `best` of the
    result is the new plan only if it saves the share `least_gain` of a step.
    """
    was = plan.problem
    costs = update(plan, recorded, *more)
    problem = SchedulingProblem.of(
        costs, was.placement, was.microbatches, was.memory, boundary=was.boundary
    )
    if plan.schedule.rows.has_memory_actions:
        old, new = _revise_memory(plan, problem, seconds)
    else:
        old = replace(plan, problem=problem, lower_bound=lower_bound(problem))
        new = solve(problem, seconds=seconds, known=[plan.schedule], progress=progress)
    new = replace(new, choices=plan.choices)
    return Revision(old, new, least_gain)


def _revise_memory(plan: Plan, problem: SchedulingProblem, seconds: float) -> tuple[Plan, Plan]:
    """Return a plan that recomputes or offloads at new costs, and another one that may as well.

    Bytes that are recomputed or offloaded limit no order.
    """
    old = replace(plan, problem=problem, lower_bound=lower_bound(problem.without_limit))
    new = plan_memory(
        problem.costs,
        ranks=problem.ranks,
        microbatches=problem.microbatches,
        memory=problem.memory,
        placement=problem.placement,
        boundary=problem.boundary,
        seconds=seconds,
        known=[old],
    )
    return old, new
