"""A plan: a schedule with its prediction and a lower bound for any schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isinf
from pathlib import Path

from penstock.atomic_files import write_atomically
from penstock.errors import ArgumentError
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.memory.words import describe_memory_actions
from penstock.planner.order.pairs import describe_pairs
from penstock.planner.plan_files import ROUNDING, SavedPlan, format_plan, read_plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.choices import Choices
from penstock.planner.search.layouts import describe_placement
from penstock.sim.engine import simulate
from penstock.sim.period import Period, name_seconds
from penstock.sim.timeline import Timeline
from penstock.units import format_bytes, format_share
from penstock.untrusted import quote

__all__ = ["Plan", "require_plans"]


@dataclass(frozen=True)
class Plan:
    """A schedule that solves a problem, and seconds that no schedule for it can beat.

    `choices` is what a search has chosen besides the order, if there was one. `is_cut_short` says
    that the time was over before the work was done, so that more time may give a better plan.
    """

    problem: SchedulingProblem
    schedule: Schedule
    lower_bound: float
    choices: Choices | None = None
    is_cut_short: bool = field(default=False, compare=False)

    @classmethod
    def from_file(cls, path: Path | str) -> "Plan":
        """Read a plan that `to_file` wrote; the prediction and the bound are computed again."""
        saved = read_plan(Path(path))
        problem = saved.problem
        if saved.schedule.rows.has_memory_actions:
            # Bytes that are recomputed or offloaded limit no order.
            problem = problem.without_limit
        return cls(saved.problem, saved.schedule, lower_bound(problem), saved.choices)

    def to_file(self, path: Path | str) -> None:
        """Write the plan as JSON: orders, costs, limits and choices, with its prediction."""
        write_atomically(path, self.to_text())

    def to_text(self) -> str:
        """Return what `to_file` writes."""
        predicted = {
            "seconds": self.seconds,
            "end_time": self.timeline.end_time,
            "longest_span": self.timeline.longest_span,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "is_cut_short": self.is_cut_short,
            "rank_bubble_rates": self.step.rank_bubble_rates,
            "rank_peak_bytes": self.timeline.rank_peak_bytes,
        }
        return format_plan(SavedPlan(self.problem, self.schedule, self.choices), predicted)

    @cached_property
    def timeline(self) -> Timeline:
        """The prediction: the schedule, simulated with the costs of the problem."""
        return simulate(self.schedule, self.problem.costs)

    @cached_property
    def step(self) -> Period:
        """The predicted step for the boundary of the problem, with the idle time of every rank."""
        return self.timeline.repeat(self.problem.boundary)

    @property
    def seconds(self) -> float:
        """What a step costs, given what ranks wait for between two steps."""
        return self.step.seconds

    @property
    def gap(self) -> float:
        """How much slower the schedule is than the bound, as a share of the bound.

        Rounding errors count as 0.
        """
        above = self.seconds / self.lower_bound - 1 if self.lower_bound else 0.0
        return above if abs(above) > ROUNDING else 0.0

    @property
    def keeps_limit(self) -> bool:
        """Whether every rank keeps its memory limit."""
        pairs = zip(self.timeline.rank_peak_bytes, self.problem.memory, strict=True)
        return all(peak <= limit * (1 + ROUNDING) for peak, limit in pairs)

    def __repr__(self) -> str:
        problem = self.problem
        return (
            f"<Plan {self.schedule.name}: {problem.ranks} ranks, {problem.stages} stages, "
            f"{problem.microbatches} microbatches, "
            f"{name_seconds(problem.boundary)} {self.seconds:.4g} s, "
            f"at most {format_share(self.gap)} above the bound{', cut short' * self.is_cut_short}>"
        )

    def __str__(self) -> str:
        timeline, problem = self.timeline, self.problem
        lines = [
            f"{self.schedule.name}: {problem.ranks} ranks, {problem.stages} stages "
            f"({describe_placement(problem.placement)}), {problem.microbatches} microbatches",
            f"{name_seconds(problem.boundary)} {self.seconds:.4g} s, "
            f"bubble {format_share(self.step.bubble_rate)}, "
            f"at most {format_share(self.gap)} above the proven bound of {self.lower_bound:.4g} s",
        ]
        if self.is_cut_short:
            lines.append("the search was cut short; more seconds may give a better plan")
        if timeline.peak_bytes:
            lines.append(self._describe_memory())
        lines += describe_memory_actions(timeline, problem.costs, problem.boundary)
        lines += describe_pairs(timeline, problem.costs, problem.boundary)
        if self.choices is not None:
            lines.append(str(self.choices))
        return "\n".join(lines)

    def _describe_memory(self) -> str:
        peaks, limits = self.timeline.rank_peak_bytes, self.problem.memory
        rank = max(range(len(peaks)), key=lambda rank: peaks[rank] / (limits[rank] or 1))
        if isinf(limits[rank]):
            rank = peaks.index(max(peaks))
            return f"rank {rank} holds most: {format_bytes(peaks[rank])}"
        return (
            f"rank {rank} is fullest: {format_bytes(peaks[rank])} of {format_bytes(limits[rank])}"
        )


def require_plans(known: object) -> None:
    """Raise an error unless these are plans to begin with."""
    if not isinstance(known, Sequence) or not all(isinstance(one, Plan) for one in known):
        raise ArgumentError(f"known must be a list of plans (got {quote(known)})")
