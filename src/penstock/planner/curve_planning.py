"""Time against memory: the fastest plan for every limit, and the bound that none can beat.

A plan for a tight limit keeps every looser one, and a bound for a loose limit holds for every
tighter one. So with more memory neither the plans nor the bounds become slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.curves import CurvePoint, MemoryCurve
from penstock.planner.limits import read_limits
from penstock.planner.order.solver import Progress
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.layouts import Layout, placements_for
from penstock.schedules.sizes import require_whole_number
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary
from penstock.untrusted import quote

__all__ = ["memory_curve"]


def memory_curve(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    limits: Sequence[float] | None = None,
    points: int = 8,
    placement: Placement | Layout | None = None,
    boundary: Boundary = DEFAULT_BOUNDARY,
    seconds: float = 1.0,
    progress: Callable[[Progress], None] | None = None,
) -> MemoryCurve:
    """Plan for growing memory limits: how many seconds do more bytes per rank save?

    Without `limits`, there are `points` of them, from the least that any order needs to what the
    fastest plan without a limit takes. `seconds` is how long to look for each plan.

    >>> costs = Costs(activation_bytes=1)
    >>> print(memory_curve(costs, ranks=4, microbatches=8, limits=[2, 4, 7], placement="loop"))
    memory  end time s  bound s    gap  bubble  order
       2 B          35       35  0.0 %  31.4 %  solved
       4 B          27       27  0.0 %  11.1 %  ZB-H1
       7 B          27       27  0.0 %  11.1 %  ZB-H1
    """
    settings = _Settings(costs, ranks, microbatches, placement, boundary, seconds, progress)
    wanted = sorted(settings.choose_limits(points) if limits is None else _read(limits))
    found: list[CurvePoint] = []
    for limit in wanted:
        best = settings.solve(limit, [point.plan for point in found[-1:]])
        found.append(CurvePoint(limit, best, settings.bound(best, limit)))
    return MemoryCurve(_tighten(found), boundary)


def _read(limits: object) -> list[float]:
    """Return the limits that a user gives."""
    given = list(limits) if isinstance(limits, Sequence | np.ndarray) else []
    if not given or isinstance(limits, str):
        raise ArgumentError(
            f"limits must not be empty; give at least one number of bytes (got {quote(limits)})"
        )
    return [read_limits(limit, 1)[0] for limit in given]


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of every plan of a curve."""

    costs: Costs
    ranks: int
    microbatches: int
    placement: Placement | Layout | None
    boundary: Boundary
    seconds: float
    progress: Callable[[Progress], None] | None

    def solve(self, limit: float | None, known: Sequence[Plan] = ()) -> Plan:
        return plan(
            self.costs,
            ranks=self.ranks,
            microbatches=self.microbatches,
            memory=limit,
            placement=self.placement,
            boundary=self.boundary,
            seconds=self.seconds,
            known=known,
            progress=self.progress,
        )

    def bound(self, best: Plan, limit: float) -> float:
        """Return what no order beats with any of the placements that were tried."""
        bounds = [best.lower_bound]
        placements = placements_for(self.costs, self.ranks) if self.placement is None else ()
        for placement in placements:
            costs = self.costs.recut(self.ranks, placement.num_stages)
            problem = SchedulingProblem(
                costs, placement, self.microbatches, (limit,) * self.ranks, self.boundary
            )
            if placement != best.problem.placement and (problem.missing_bytes <= 0).all():
                bounds.append(lower_bound(problem))
        return min(bounds)

    def choose_limits(self, points: int) -> list[float]:
        """Return limits from the least that is needed to what a plan without a limit takes."""
        require_whole_number("points", points)
        if points < 1:
            raise ArgumentError(f"points must be at least 1 (got {points})")
        free = self.solve(None)
        most = free.timeline.peak_bytes
        if not most:
            raise ArgumentError(
                "the costs must have bytes, or no limit matters; give activation_bytes"
            )
        least = float(free.problem.least_bytes.max())
        return [float(limit) for limit in np.linspace(least, most, points)]


def _tighten(found: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Raise bounds to those of looser limits, which hold for tighter ones too."""
    tightened: list[CurvePoint] = []
    bound = 0.0
    for point in reversed(found):
        bound = max(bound, min(point.lower_bound, point.seconds))
        tightened.append(replace(point, lower_bound=bound))
    return tuple(reversed(tightened))
