"""Solve a problem: find the best schedule in a given time.

fixed families -> guesses -> orders built from them -> the best ones improved -> exact, if small

Nothing is ever worse than the best fixed family that keeps the limit, and no more time is spent
once a schedule is as fast as the lower bound.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from penstock.checks.report import check
from penstock.errors import ArgumentError
from penstock.ir.clock import expect_rows
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.exact.prove import prove
from penstock.planner.order.best_so_far import BestSoFar, Progress
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.lanes import Lanes
from penstock.planner.order.merge import make_whole, merge_for_free, with_whole_backwards
from penstock.planner.order.search import search_orders
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.untrusted import quote, to_quantity

__all__ = ["Progress", "require_seconds", "solve"]

# Some of the time is kept back for what comes after the search: checks, or an exact answer.
_SHARE_FOR_SEARCH = 0.75
_SHARE_BEFORE_EXACT = 0.25

# About this many whole schedules are simulated.
_SIMULATIONS = 10

# The largest sizes for which an exact answer can be expected.
_RANKS_FOR_EXACT = 4
_MICROBATCHES_FOR_EXACT = 8


def solve(
    problem: SchedulingProblem,
    *,
    seconds: float = 5.0,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find the fastest schedule for a problem that keeps its memory limit, within some seconds.

    These are seconds of work: on a busy machine it takes longer, up to six times. `progress` is
    called now and then with the state of the search.

    >>> from penstock.costs import Costs
    >>> from penstock.ir.placement import Placement
    >>> costs = Costs(forward=(1, 1, 2), transfer=0.1, activation_bytes=1, weight_stash_bytes=0.5)
    >>> plan = solve(SchedulingProblem.of(costs, Placement.loop(3), 6, memory=4), seconds=1)
    >>> round(plan.seconds, 3), round(plan.gap, 3)
    (26.2, 0.0)
    """
    require_seconds(seconds)
    found = BestSoFar(problem, lower_bound(problem), seconds, progress)
    may_be_exact = _is_small(problem) and find_spec("ortools") is not None
    _search(found, seconds * (_SHARE_BEFORE_EXACT if may_be_exact else _SHARE_FOR_SEARCH))
    if not found.is_optimal and may_be_exact:
        _make_exact(found)
    check(found.best)
    is_cut_short = found.is_cut_short and not found.is_optimal
    return Plan(problem, found.best, found.bound, is_cut_short=is_cut_short)


def require_seconds(seconds: object) -> None:
    """Raise an error unless this is how long to search."""
    if to_quantity(seconds) is None:
        raise ArgumentError(f"seconds must be a number from 0 (got {quote(seconds)})")


def _search(found: BestSoFar, seconds: float) -> None:
    """Try families, then orders with whole backwards if these are cheaper, then any orders."""
    expect_rows(_SIMULATIONS * Lanes(found.problem).num_rows)
    families = list(fixed_schedules(found.problem))
    for schedule in families:
        found.offer(schedule, schedule.name)
    whole = with_whole_backwards(found.problem)
    if whole is not None and not found.is_optimal:
        unsplit = BestSoFar(whole, lower_bound(whole), (seconds - found.elapsed) / 2, None)
        search_orders(unsplit, families, unsplit.seconds)
        found.is_cut_short |= unsplit.is_cut_short
        if unsplit.has_best:
            found.offer(make_whole(unsplit.best), "whole backwards")
    if not found.is_optimal:
        search_orders(found, families, seconds)


def _is_small(problem: SchedulingProblem) -> bool:
    return problem.ranks <= _RANKS_FOR_EXACT and problem.microbatches <= _MICROBATCHES_FOR_EXACT


def _make_exact(found: BestSoFar) -> None:
    """Search for an exact answer, from the best so far, in the remaining time."""
    found.report("exact")
    exact = prove(found.problem, start=found.best, seconds=max(0.1, found.seconds - found.elapsed))
    if not found.problem.costs.overlap_gain:
        # The proof holds for actions that run one after the other.
        found.bound = max(found.bound, exact.lower_bound)
    named = replace(exact.schedule, name="solved")
    found.offer(merge_for_free(named, found.problem), "exact")
