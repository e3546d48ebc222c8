"""From a problem to the best schedule that can be found in a given time.

fixed families -> guesses -> orders built from them -> the best ones improved -> exact, if small

Nothing is ever worse than the best fixed family that keeps the limit, and no more time is spent
once a schedule is as fast as the lower bound.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

from penstock.checks.report import check
from penstock.ir.clock import expect_rows
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.exact.prove import prove
from penstock.planner.order.best_so_far import Progress, Race
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.lanes import Lanes
from penstock.planner.order.merge import make_whole, merge_for_free, with_whole_backwards
from penstock.planner.order.search import search_orders
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem

__all__ = ["Progress", "solve"]

# Some of the time is kept back for what comes after the search: checks, or an exact answer.
_SHARE_FOR_SEARCH = 0.75
_SHARE_BEFORE_EXACT = 0.25

# About so many simulations are made of whole schedules.
_SIMULATIONS = 10

# Up to these sizes an exact answer can be expected.
_RANKS_FOR_EXACT = 4
_MICROBATCHES_FOR_EXACT = 8


def solve(
    problem: SchedulingProblem,
    *,
    seconds: float = 5.0,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find the fastest schedule for a problem that keeps its limit, looking for so many seconds.

    `progress` is told now and then how far it has come.

    >>> from penstock.costs import Costs
    >>> from penstock.ir.placement import Placement
    >>> costs = Costs(forward=(1, 1, 2), transfer=0.1, activation_bytes=1, weight_stash_bytes=0.5)
    >>> found = solve(Problem.of(costs, Placement.loop(3), 6, memory=4), seconds=1)
    >>> round(found.timeline.makespan, 3), round(found.gap, 3)
    (24.0, 0.0)
    """
    race = Race(problem, lower_bound(problem), seconds, progress)
    may_be_exact = _is_small(problem) and find_spec("ortools") is not None
    _search(race, seconds * (_SHARE_BEFORE_EXACT if may_be_exact else _SHARE_FOR_SEARCH))
    if not race.is_won and may_be_exact:
        _make_exact(race)
    check(race.best)
    return Plan(problem, race.best, race.bound)


def _search(race: Race, seconds: float) -> None:
    """Families first, then orders with whole backwards if these are cheaper, then any orders."""
    expect_rows(_SIMULATIONS * Lanes(race.problem).num_rows)
    families = list(fixed_schedules(race.problem))
    for schedule in families:
        race.offer(schedule, schedule.name)
    whole = with_whole_backwards(race.problem)
    if whole is not None and not race.is_won:
        unsplit = Race(whole, lower_bound(whole), (seconds - race.gone) / 2, None)
        search_orders(unsplit, families, unsplit.seconds)
        if unsplit.has_best:
            race.offer(make_whole(unsplit.best), "whole backwards")
    if not race.is_won:
        search_orders(race, families, seconds)


def _is_small(problem: SchedulingProblem) -> bool:
    return problem.ranks <= _RANKS_FOR_EXACT and problem.microbatches <= _MICROBATCHES_FOR_EXACT


def _make_exact(race: Race) -> None:
    """Look for the best there is, from the best so far, in the time that is left."""
    race.report("exact")
    exact = prove(race.problem, start=race.best, seconds=max(0.1, race.seconds - race.gone))
    if not race.problem.costs.overlap_gain:
        # What it proves is for actions that run one after the other.
        race.bound = max(race.bound, exact.lower_bound)
    named = replace(exact.schedule, name="solved")
    race.offer(merge_for_free(named, race.problem), "exact")
