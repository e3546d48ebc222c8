"""Tables of published and predicted numbers, as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.problem import SchedulingProblem
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary
from penstock.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """Return a share with its sign, such as +1.9 %."""
    return f"{share:+.1%}".replace("%", " %")


def above_bound(
    timeline: Timeline, costs: Costs, *, boundary: Boundary = DEFAULT_BOUNDARY
) -> float:
    """Return by how much an order is above what no order with its stages and memory beats."""
    schedule: Schedule = timeline.schedule
    problem = SchedulingProblem.of(
        costs,
        schedule.placement,
        schedule.microbatches,
        timeline.rank_peak_bytes if timeline.peak_bytes else None,
        boundary=boundary,
    )
    return timeline.period(boundary) / lower_bound(problem) - 1
