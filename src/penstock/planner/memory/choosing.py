"""Choose how an order is fitted: try ways, fit again for the times that result, keep the best."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.planner.memory.fitting import OFFLOAD, Way, fit_order, recompute_stages
from penstock.planner.order.best_so_far import meets_bound
from penstock.planner.plan_files import ROUNDING
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

__all__ = ["BestFit", "fit_all"]

# The most microbatches that room is reserved for, so that copies come back early.
_MOST_RESERVED = 3
# A fit changes the times that it was made for; the next one is made for the new times.
_ROUNDS = 3
# The orders that look best are fitted in all ways whatever the clock says.
_FEWEST_ORDERS = 2


@dataclass(slots=True)
class BestFit:
    """The fastest run so far that keeps the limit, with the ways that led to it.

    No run is faster than `bound`.
    """

    problem: SchedulingProblem
    bound: float
    timeline: Timeline | None = None
    seconds: float = inf
    ways: tuple[Way, ...] = ()

    @property
    def is_optimal(self) -> bool:
        """Whether no run can be faster than the best so far."""
        return meets_bound(self.seconds, self.bound)

    def offer(self, timeline: Timeline, ways: tuple[Way, ...] = ()) -> None:
        """Take a run if it is faster and keeps the limit."""
        seconds = timeline.period(self.problem.boundary)
        if seconds < self.seconds and self._keeps_limit(timeline):
            self.timeline, self.seconds, self.ways = timeline, seconds, ways

    def offer_schedule(self, schedule: Schedule | None, ways: tuple[Way, ...] = ()) -> float:
        """Simulate a schedule and take it if it is better; return its seconds."""
        if schedule is None:
            return inf
        timeline = simulate(schedule, self.problem.costs)
        self.offer(timeline, ways)
        return timeline.period(self.problem.boundary)

    def offer_fit(self, timeline: Timeline, ways: tuple[Way, ...]) -> float:
        """Fit an order in these ways, one per rank; return the seconds of that."""
        return self.offer_schedule(fit_order(self.problem, timeline, ways), ways)

    def _keeps_limit(self, timeline: Timeline) -> bool:
        pairs = zip(timeline.rank_peak_bytes, self.problem.memory, strict=True)
        return all(peak <= limit * (1 + ROUNDING) for peak, limit in pairs)


def fit_all(
    problem: SchedulingProblem,
    orders: Sequence[Timeline],
    means: frozenset[Kind],
    has_time: Callable[[], bool],
    *,
    bound: float,
) -> BestFit:
    """Return the best fit of some orders by these means, or the first that meets the bound.

    Each order is fitted in one way first, and those that came out best in all ways.
    """
    best = BestFit(problem, bound)
    promising: list[tuple[float, int]] = []
    for at, order in enumerate(orders):
        if best.is_optimal:
            return best
        promising.append((_fit_once(best, order, means), at))
    for number, (_, at) in enumerate(sorted(promising)):
        if best.is_optimal or (number >= _FEWEST_ORDERS and not has_time()):
            break
        _fit_in_all_ways(best, orders[at], means)
    _improve(best, means, has_time)
    return best


def _ways(means: frozenset[Kind]) -> Iterator[Way]:
    """Yield the ways to fit a rank by these means, the one that is best most often first."""
    if means >= OFFLOAD:
        yield from (Way(means, reserve) for reserve in (1, 0, *range(2, _MOST_RESERVED + 1)))
        yield Way(means, 1, is_latest_first=True)
    else:
        yield Way(means)
        yield Way(means, is_latest_first=True)


def _fit_once(best: BestFit, order: Timeline, means: frozenset[Kind]) -> float:
    best.offer(order)
    # Nothing goes into an overlap.
    if order.schedule.rows.joined.any():
        return inf
    if means - OFFLOAD:
        best.offer_schedule(recompute_stages(best.problem, order))
    return best.offer_fit(order, (next(_ways(means)),) * best.problem.ranks)


def _fit_in_all_ways(best: BestFit, order: Timeline, means: frozenset[Kind]) -> None:
    is_slower = order.period(best.problem.boundary) >= best.seconds
    if is_slower or order.schedule.rows.joined.any():
        return
    for way in _ways(means):
        before = best.seconds
        best.offer_fit(order, (way,) * best.problem.ranks)
        if best.seconds < before:
            _fit_again(best)


def _fit_again(best: BestFit) -> None:
    """Fit the best order so far again, for the times that it has now."""
    for _ in range(_ROUNDS):
        before = best.timeline
        if before is None or not best.ways:
            return
        best.offer_fit(before, best.ways)
        if best.timeline is before:
            return


def _improve(best: BestFit, means: frozenset[Kind], has_time: Callable[[], bool]) -> None:
    """Try other ways for single ranks, until none of them helps or the time is over."""
    is_better = True
    while is_better and best.ways and not best.is_optimal and has_time():
        before = best.seconds
        for rank in range(best.problem.ranks):
            for way in _ways(means):
                if best.timeline is not None and best.ways and has_time():
                    ways = (*best.ways[:rank], way, *best.ways[rank + 1 :])
                    best.offer_fit(best.timeline, ways)
        is_better = best.seconds < before
