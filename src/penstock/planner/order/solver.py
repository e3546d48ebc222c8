"""Solve a problem: find the best schedule with a given effort.

fixed families -> guesses -> orders built from them -> the best ones improved -> exact, if small

Nothing is ever worse than the best fixed family that keeps the limit, and no more work is done
once a schedule is as fast as the lower bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import inf

from penstock.checks.report import check
from penstock.ir.clock import expect_rows
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import Effort, require_effort, require_seconds
from penstock.planner.exact.prove import prove
from penstock.planner.order.best_so_far import BestSoFar, Progress
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.merge import make_whole, merge_for_free, with_whole_backwards
from penstock.planner.order.pairs import in_lockstep, make_apart, step_seconds, with_pairs
from penstock.planner.order.queues import Queues
from penstock.planner.order.search import (
    ROWS_PER_SECOND,
    count_rows,
    load_loops,
    search_orders,
)
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem

__all__ = ["Progress", "solve"]

# Some of the effort is for what comes after the search: checks, or an exact answer.
_SHARE_FOR_SEARCH = 0.75
_SHARE_BEFORE_EXACT = 0.25

# The clock does not end a search before it has done the work of these seconds.
_FLOOR_SECONDS = 0.1

# The exact solver counts its own work, in units of some seconds. The time on the wall ends it if
# it takes this many times as long.
_WORK_PER_SECOND, _BUSY = 0.25, 10.0

# About this many whole schedules are simulated.
_SIMULATIONS = 10

# The largest sizes for which an exact answer can be expected.
_RANKS_FOR_EXACT = 4
_MICROBATCHES_FOR_EXACT = 8


@dataclass(frozen=True, slots=True)
class _Request:
    """The effort of a search, the rows of it that no clock ends, and the seconds of a proof.

    The exact solver counts these seconds itself.
    """

    effort: Effort
    floor: float
    exact: float

    @classmethod
    def of(cls, problem: SchedulingProblem, seconds: float, rows: float | None) -> "_Request":
        """Return what some seconds are worth, or the given rows, which no clock ends."""
        if rows is not None:
            return cls(Effort(float(rows), inf), 0.0, rows / ROWS_PER_SECOND[True])
        floor = count_rows(problem, _FLOOR_SECONDS)
        return cls(Effort(max(floor, count_rows(problem, seconds)), seconds), floor, seconds)

    @property
    def is_floor(self) -> bool:
        """Whether the seconds are worth less than the least work that is done."""
        return self.effort.rows <= self.floor


def solve(
    problem: SchedulingProblem,
    *,
    seconds: float = 5.0,
    effort: float | None = None,
    known: Sequence[Schedule] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find the fastest schedule for a problem that keeps its memory limit.

    `seconds` are processor seconds: they say how much work to do, and end it if it takes longer.
    `effort` is that work itself, in rows of orders that are built, and no clock ends it: the same
    effort gives the same schedule on every machine, and more effort never gives a slower one (but
    for exact answers that are not proven, where this is not guaranteed).

    `known` are schedules to begin with: the answer is never slower than one of them that keeps the
    limit, for example the answer for a tighter one. Those of other placements or sizes are left
    out. `progress` is called now and then with the state of the search.

    >>> from penstock.costs import Costs
    >>> from penstock.ir.placement import Placement
    >>> costs = Costs(forward=(1, 1, 2), transfer=0.1, activation_bytes=1, weight_stash_bytes=0.5)
    >>> plan = solve(SchedulingProblem.of(costs, Placement.loop(3), 6, memory=4), seconds=1)
    >>> round(plan.seconds, 3), round(plan.gap, 3)
    (26.2, 0.0)
    """
    require_seconds(seconds)
    require_effort(effort)
    wanted = _Request.of(problem, seconds, effort)
    load_loops(problem, wanted.effort.rows)
    found = BestSoFar(problem, lower_bound(problem), progress, wanted.floor)
    may_be_exact = _is_small(problem) and find_spec("ortools") is not None
    share = _SHARE_BEFORE_EXACT if may_be_exact else _SHARE_FOR_SEARCH
    usable = [schedule for schedule in known if _is_for(schedule, problem)]
    _search(found, usable, wanted.effort.part(share))
    if not found.is_optimal and may_be_exact:
        _make_exact(found, wanted)
    if problem.costs.overlap_gain and not found.is_optimal:
        _overlap(found)
    check(found.best)
    is_cut_short = (found.is_cut_short or wanted.is_floor) and not found.is_optimal
    return Plan(problem, found.best, found.bound, is_cut_short=is_cut_short)


def _is_for(schedule: Schedule, problem: SchedulingProblem) -> bool:
    """Return whether a schedule solves a problem, if it keeps its limit."""
    is_same = schedule.placement == problem.placement and schedule.dataflow == problem.dataflow
    is_whole = bool(schedule.rows.is_compute.all()) and not schedule.is_forward_only
    return is_same and is_whole and schedule.microbatches == problem.microbatches


def _search(found: BestSoFar, known: Sequence[Schedule], effort: Effort) -> None:
    """Try what is known, then orders with whole backwards if these are cheaper, then any orders.

    Orders with whole backwards get half of the seconds, and half of the rows on top.
    """
    expect_rows(_SIMULATIONS * Queues(found.problem).num_rows)
    known = [*known, *fixed_schedules(found.problem)]
    for schedule in known:
        found.offer(schedule, schedule.name)
    whole = with_whole_backwards(found.problem)
    if whole is not None and not found.is_optimal:
        half = Effort(effort.rows / 2, (effort.seconds - found.elapsed) / 2)
        unsplit = BestSoFar(whole, lower_bound(whole), None, found.floor)
        search_orders(unsplit, known, half)
        found.is_cut_short |= unsplit.is_cut_short
        if unsplit.has_best:
            found.offer(make_whole(unsplit.best), "whole backwards")
    if not found.is_optimal:
        search_orders(found, known, effort)


def _overlap(found: BestSoFar) -> None:
    """Try overlapped pairs in the best order, in the fastest family, and in one made for them."""
    problem = found.problem
    families = [make_apart(schedule) for schedule in fixed_schedules(problem)]
    families.sort(key=partial(step_seconds, problem=problem))
    starts = [make_apart(found.best), *families[:1], *in_lockstep(problem)]
    for schedule in starts:
        found.offer(with_pairs(schedule, problem), "overlapped pairs")


def _is_small(problem: SchedulingProblem) -> bool:
    return problem.ranks <= _RANKS_FOR_EXACT and problem.microbatches <= _MICROBATCHES_FOR_EXACT


def _make_exact(found: BestSoFar, wanted: _Request) -> None:
    """Search for an exact answer, from the best so far; without a proof it is cut short."""
    found.report("exact")
    work = _WORK_PER_SECOND * max(_FLOOR_SECONDS, (1 - _SHARE_BEFORE_EXACT) * wanted.exact)
    seconds = _BUSY * max(0.5, wanted.effort.seconds)
    exact = prove(found.problem, start=found.best, seconds=seconds, work=work)
    if not found.problem.costs.overlap_gain:
        # The proof holds for actions that run one after the other.
        found.bound = max(found.bound, exact.lower_bound)
    named = replace(exact.schedule, name="solved")
    found.offer(merge_for_free(named, found.problem), "exact")
    found.is_cut_short |= not exact.is_optimal
