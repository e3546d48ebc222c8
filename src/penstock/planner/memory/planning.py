"""Planning with memory as part of the order: what to recompute, offload or keep.

orders for several limits -> each fitted into the real one by several means -> the fastest

An order that needs more than a rank has is fitted by recomputing and offloading. So orders are
found for the limit itself, for larger ones and for none, and whatever is fastest after fitting
wins. Recomputing whole stages is among the ways to fit, and so is each means alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.costs.given import costs_or_unit
from penstock.errors import MemoryLimitError
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import EffortClock, require_seconds
from penstock.planner.memory.fitting import (
    BOTH,
    OFFLOAD,
    RECOMPUTE,
    Way,
    fit_order,
    recompute_stages,
)
from penstock.planner.memory.orders import find_orders
from penstock.planner.plan_files import ROUNDING
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.layouts import Layout, find_placement, placements_for
from penstock.schedules.sizes import require_size
from penstock.sim.engine import simulate
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary
from penstock.sim.timeline import Timeline

__all__ = ["plan_memory"]

_SHARE_FOR_ORDERS = 0.6
# The most microbatches that room is reserved for, so that copies come back early.
_MOST_RESERVED = 3
# A fit changes the times that it was made for; the next one is made for the new times.
_ROUNDS = 3
# The fastest orders are fitted whatever the clock says.
_FEWEST_ORDERS = 4


def plan_memory(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory: float | Sequence[float],
    placement: Placement | Layout | None = None,
    boundary: Boundary = DEFAULT_BOUNDARY,
    seconds: float = 5.0,
) -> Plan:
    """Find a fast schedule that keeps a memory limit by recomputing and offloading where it pays.

    Each forward of each stage and microbatch is kept, recomputed or, if `costs` have a
    `host_link`, offloaded. The arguments are those of `plan`. The lower bound is that of the same
    problem without a limit, because what is recomputed or offloaded only takes more time.

    >>> costs = Costs(activation_bytes=1, message_bytes=0.1, host_link=1)
    >>> found = plan_memory(costs, ranks=2, microbatches=4, memory=1.5, seconds=0.5)
    >>> found.keeps_limit, found.schedule.rows.has_memory_actions
    (True, True)
    """
    require_size(ranks, microbatches)
    require_seconds(seconds)
    costs = costs_or_unit(costs)
    if placement is None:
        holders = list(placements_for(costs, ranks))
    else:
        holders = [find_placement(placement, ranks, costs)]
    plans, refused = [], []
    for holder in holders:
        cut = costs.recut(ranks, holder.num_stages)
        try:
            problem = SchedulingProblem.of(cut, holder, microbatches, memory, boundary=boundary)
            plans.append(_solve(problem, seconds / len(holders)))
        except MemoryLimitError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    return min(plans, key=lambda found: found.seconds)


def _solve(problem: SchedulingProblem, seconds: float) -> Plan:
    """Return the fastest schedule that is found for one placement."""
    orders, _ = find_orders(problem, seconds=_SHARE_FOR_ORDERS * seconds, effort=None)
    clock, best, limit = EffortClock(), _Best(problem), (1 - _SHARE_FOR_ORDERS) * seconds
    for number, timeline in enumerate(orders):
        if number >= _FEWEST_ORDERS and clock.seconds >= limit:
            break
        best.fit(timeline)
    best.improve(lambda: clock.seconds < limit)
    if best.timeline is None:
        raise MemoryLimitError(
            "no schedule was found that keeps the memory limit, even if all stages recompute; "
            "use a larger limit, more ranks or smaller microbatches"
        )
    schedule = replace(best.timeline.schedule, name="planned")
    check(schedule)
    return Plan(problem, schedule, lower_bound(problem.without_limit))


@dataclass(slots=True)
class _Best:
    """The fastest run so far that keeps the limit."""

    problem: SchedulingProblem
    timeline: Timeline | None = None
    seconds: float = inf
    ways: tuple[Way, ...] = ()

    def fit(self, timeline: Timeline) -> None:
        """Try all ways to fit an order; `timeline` is its run without a limit."""
        if self._seconds(timeline) >= self.seconds:
            return
        self._offer(timeline)
        # Nothing goes into an overlap.
        if timeline.schedule.rows.joined.any():
            return
        self._offer_schedule(recompute_stages(self.problem, timeline))
        for way in self._ways():
            before = self.seconds
            self._offer_fit(timeline, (way,) * self.problem.ranks)
            if self.seconds < before:
                self._fit_again()

    def improve(self, has_time: Callable[[], bool]) -> None:
        """Try other ways for single ranks, until none of them helps or the time is over."""
        is_better = True
        while is_better and self.ways and has_time():
            before = self.seconds
            for rank in range(self.problem.ranks):
                for way in self._ways() if has_time() else ():
                    assert self.timeline is not None, "some way was offered"
                    ways = (*self.ways[:rank], way, *self.ways[rank + 1 :])
                    self._offer_fit(self.timeline, ways)
            is_better = self.seconds < before

    def _ways(self) -> Iterator[Way]:
        if self.problem.costs.host_link is not None:
            yield from (Way(BOTH, reserve) for reserve in range(_MOST_RESERVED + 1))
            yield from (Way(OFFLOAD, reserve) for reserve in range(2))
        yield Way(RECOMPUTE)

    def _fit_again(self) -> None:
        """Fit the best order so far again, for the times that it has now."""
        for _ in range(_ROUNDS):
            before = self.timeline
            assert before is not None, "one was offered"
            self._offer_fit(before, self.ways)
            if self.timeline is before:
                return

    def _offer_fit(self, timeline: Timeline, ways: tuple[Way, ...]) -> None:
        before = self.timeline
        self._offer_schedule(fit_order(self.problem, timeline, ways))
        if self.timeline is not before:
            self.ways = ways

    def _offer_schedule(self, schedule: Schedule | None) -> None:
        if schedule is not None:
            self._offer(simulate(schedule, self.problem.costs))

    def _offer(self, timeline: Timeline) -> None:
        seconds = self._seconds(timeline)
        if seconds < self.seconds and _keeps_limit(timeline, self.problem):
            self.timeline, self.seconds, self.ways = timeline, seconds, ()

    def _seconds(self, timeline: Timeline) -> float:
        return timeline.period(self.problem.boundary)


def _keeps_limit(timeline: Timeline, problem: SchedulingProblem) -> bool:
    pairs = zip(timeline.rank_peak_bytes, problem.memory, strict=True)
    return all(peak <= limit * (1 + ROUNDING) for peak, limit in pairs)
