"""Planning with memory as part of the order: what to recompute, offload or keep.

orders for easier problems -> each fitted into the limit by several means -> the fastest
                                                                  -> exact, if small

An order that needs more than a rank has is fitted by recomputing and offloading. Recomputing whole
stages is among the ways to fit. Each means alone is tried as far as if it were the only one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Literal, TypeAlias

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.costs.given import costs_or_unit
from penstock.errors import ArgumentError, MemoryLimitError
from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import EffortClock, require_effort, require_seconds
from penstock.planner.exact.prove_memory import prove_memory
from penstock.planner.memory.choosing import BestFit, fit_all
from penstock.planner.memory.fitting import BOTH, OFFLOAD, RECOMPUTE
from penstock.planner.memory.orders import OrderFinder
from penstock.planner.order.queues import Queues
from penstock.planner.order.search import ROWS_PER_SECOND
from penstock.planner.plans import Plan, require_plans
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.layouts import Layout, find_placement, placements_for
from penstock.schedules.sizes import require_size
from penstock.sim.engine import simulate
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary

__all__ = ["Means", "plan_memory"]

Means: TypeAlias = Literal["both", "recompute", "offload"]

_MEANS: dict[str, frozenset[Kind]] = {"both": BOTH, "recompute": RECOMPUTE, "offload": OFFLOAD}

_SHARE_FOR_ORDERS = 0.5
_SHARE_FOR_EXACT = 0.5
# Fitting an order and running it takes as long as building this many.
_BUILT_PER_FIT = 20.0

# The largest sizes for which an exact answer can be expected.
_RANKS_FOR_EXACT = 4
_WORKS_FOR_EXACT = 32
# The exact solver counts its own work, in units of some seconds.
_WORK_PER_SECOND = 0.25
# The time on the wall ends it if it takes this many times as long.
_BUSY = 10.0


def plan_memory(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory: float | Sequence[float],
    placement: Placement | Layout | None = None,
    boundary: Boundary = DEFAULT_BOUNDARY,
    means: Means = "both",
    seconds: float = 5.0,
    effort: float | None = None,
    known: Sequence[Plan] = (),
) -> Plan:
    """Find a fast schedule that keeps a memory limit by recomputing and offloading where it pays.

    Each forward of each stage and microbatch is kept, recomputed or, if `costs` have a
    `host_link`, offloaded; `means` says which of the two may be. The other arguments are those of
    `plan`. With `effort`, the rows of orders to build for each easier problem, both means are
    never slower than one of them, and the plan is the same everywhere.

    The lower bound is that of the same problem without a limit, because what is recomputed or
    offloaded only takes more time; for up to 4 ranks and 32 forwards the exact solver raises it.

    >>> costs = Costs(activation_bytes=1, message_bytes=0.1, host_link=1)
    >>> found = plan_memory(costs, ranks=2, microbatches=4, memory=1.5, seconds=0.5)
    >>> found.keeps_limit, found.schedule.rows.has_memory_actions
    (True, True)
    """
    require_size(ranks, microbatches)
    require_seconds(seconds)
    require_effort(effort)
    require_plans(known)
    costs = costs_or_unit(costs)
    wanted = _read_means(means, costs)
    if placement is None:
        holders = list(placements_for(costs, ranks))
    else:
        holders = [find_placement(placement, ranks, costs)]
    problems, refused = [], []
    for holder in holders:
        cut = costs.recut(ranks, holder.num_stages)
        try:
            problems.append(
                SchedulingProblem.of(cut, holder, microbatches, memory, boundary=boundary)
            )
        except MemoryLimitError as error:
            refused.append(error)
    plans: list[Plan] = []
    for solver in _solvers(problems, wanted, seconds, effort, known):
        if plans and solver.bound >= min(plan.seconds for plan in plans):
            break
        try:
            plans.append(solver.solve())
        except MemoryLimitError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    best = min(plans, key=lambda found: found.seconds)
    return replace(best, is_cut_short=best.gap > 0 and any(one.is_cut_short for one in plans))


def _solvers(
    problems: Sequence[SchedulingProblem],
    means: frozenset[Kind],
    seconds: float,
    effort: float | None,
    known: Sequence[Plan],
) -> Iterator["_Solver"]:
    """Yield a solver for each placement, the one with the lowest bound first."""
    clock = EffortClock()
    bounds = [lower_bound(problem.without_limit) for problem in problems]
    order = sorted(range(len(problems)), key=bounds.__getitem__)
    for number, at in enumerate(order):
        mine = _share(number, len(order)) * max(0.0, seconds - clock.seconds)
        yield _Solver(problems[at], bounds[at], means, _Limit(mine, effort), known)


def _share(number: int, count: int) -> float:
    """Return the share of what is left for one of several attempts, the most promising first."""
    return 1.0 if number == count - 1 else 0.5


def _read_means(means: str, costs: Costs) -> frozenset[Kind]:
    if means not in _MEANS:
        raise ArgumentError(f"means must be one of {', '.join(_MEANS)} (got {means!r})")
    if means == "offload" and costs.host_link is None:
        raise ArgumentError(
            "offloading needs a link to the host; give costs a host_link in bytes per second"
        )
    return _MEANS[means] if costs.host_link is not None else RECOMPUTE


@dataclass(slots=True)
class _Limit:
    """How much to do: seconds of the clock, or rows of orders, which no clock ends."""

    seconds: float
    effort: float | None
    is_cut_short: bool = False
    _clock: EffortClock = field(default_factory=EffortClock)

    def part(self, problem: SchedulingProblem, share: float) -> Callable[[], bool]:
        """Return whether any is left, asked before every fit that is not a must.

        The share is that of the seconds that are left, or all of the effort.
        """
        if self.effort is None:
            now = self._clock.seconds
            end = now + share * max(0.0, self.seconds - now)
            return lambda: self._note(self._clock.seconds < end)
        fits = iter(range(int(self.effort / (_BUILT_PER_FIT * Queues(problem).num_rows))))
        return lambda: next(fits, None) is not None

    def _note(self, is_left: bool) -> bool:
        self.is_cut_short |= not is_left
        return is_left

    @property
    def exact(self) -> tuple[float, float]:
        """The seconds on the wall of a proof, and the work that the solver counts."""
        seconds = _SHARE_FOR_EXACT * self.seconds
        if self.effort is not None:
            seconds = self.effort / ROWS_PER_SECOND[True]
        return _BUSY * max(0.5, seconds), _WORK_PER_SECOND * seconds


@dataclass(frozen=True, slots=True)
class _Solver:
    """Finds the fastest schedule for one placement."""

    problem: SchedulingProblem
    bound: float
    means: frozenset[Kind]
    limit: _Limit
    known: Sequence[Plan]

    def solve(self) -> Plan:
        """Return the best plan by each means alone, by all, and of those that are known.

        Offloading comes first: it is what meets the bound most often, and then nothing else is
        tried.
        """
        problem, limit = self.problem, self.limit
        finder = OrderFinder(problem, limit.effort, _SHARE_FOR_ORDERS * limit.seconds)
        each = [OFFLOAD, RECOMPUTE, BOTH] if self.means == BOTH else [self.means]
        found = BestFit(problem, self.bound)
        for number, means in enumerate(each):
            if found.is_optimal:
                break
            orders = finder.find(means)
            has_time = limit.part(problem, _share(number, len(each)))
            fitted = fit_all(problem, orders, means, has_time, bound=self.bound)
            if fitted.timeline is not None:
                found.offer(fitted.timeline, fitted.ways)
        for plan in self.known:
            if _is_for(plan, problem, self.means):
                found.offer(simulate(plan.schedule, problem.costs))
        if found.timeline is None:
            raise MemoryLimitError(
                "no schedule was found that keeps the memory limit, even if all stages recompute; "
                "use a larger limit, more ranks or smaller microbatches"
            )
        return self._make_exact(found, finder.is_cut_short or limit.is_cut_short)

    def _make_exact(self, found: BestFit, is_cut_short: bool) -> Plan:
        """Return the plan, after a search for a better one with a proof if it is small."""
        assert found.timeline is not None, "something keeps the limit"
        problem, schedule = self.problem, found.timeline.schedule
        bound = self.bound
        if _can_be_exact(problem) and not found.is_optimal:
            seconds, work = self.limit.exact
            exact = prove_memory(
                problem, start=schedule, means=self.means, seconds=seconds, work=work
            )
            schedule, bound = exact.schedule, max(bound, exact.lower_bound)
            is_cut_short = not exact.is_optimal
        schedule = replace(schedule, name="planned")
        check(schedule)
        plan = Plan(problem, schedule, bound, is_cut_short=is_cut_short)
        return replace(plan, is_cut_short=is_cut_short and plan.gap > 0)


def _is_for(plan: Plan, problem: SchedulingProblem, means: frozenset[Kind]) -> bool:
    """Return whether a plan's schedule solves a problem by these means, if it keeps its limit."""
    schedule = plan.schedule
    is_same = schedule.placement == problem.placement and schedule.dataflow == problem.dataflow
    other = {Kind.RECOMPUTE, Kind.OFFLOAD} - means
    is_allowed = not schedule.rows.has_kind(*other) if other else True
    return is_same and is_allowed and schedule.microbatches == problem.microbatches


def _can_be_exact(problem: SchedulingProblem) -> bool:
    """Return whether an exact answer can be expected, and its proof would hold."""
    is_small = problem.ranks <= _RANKS_FOR_EXACT
    is_small &= problem.stages * problem.microbatches <= _WORKS_FOR_EXACT
    is_modelled = problem.lasts_until_all_end and not problem.costs.overlap_gain
    return is_small and is_modelled and find_spec("ortools") is not None
