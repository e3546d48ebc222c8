"""The search for a good order: the limit and the rungs of a ladder below it take turns.

round       0          1          2   ...      rungs of finer levels join later
            |          |          |
p/2         .          step       step         a step builds some orders within the rung's limit,
p           step       step       step         from guesses and from changes to its best ones; it
3p/2        .          step       step         may take over the best of the rungs below
limit       steps      steps      steps

More effort is more of the same steps in the same order, so it is never worse, unless the clock
ends the search (`BestSoFar.is_cut_short`). For more memory see `ladder.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from random import Random

from penstock.costs import Costs
from penstock.ir.loops import can_compile
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.anneal import anneal
from penstock.planner.order.best_so_far import BestSoFar
from penstock.planner.order.builder import Builder
from penstock.planner.order.climb import ImprovedOrder
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.guesses import Guesser
from penstock.planner.order.ladder import Rung, find_rungs
from penstock.planner.order.lanes import Lanes
from penstock.planner.order.loops import should_compile
from penstock.planner.order.merge import merge_for_free
from penstock.planner.order.rung_search import RungSearch, Steps
from penstock.planner.problem import SchedulingProblem

__all__ = ["count_rows", "load_loops", "search_orders"]

# Rows that a second of effort has: as many as are surely built in one, compiled and plain.
_ROWS_PER_SECOND = {True: 5_000_000.0, False: 120_000.0}

# The compiled loops take about a second to load: worth it if one order has more rows than this, or
# if there are at least this many seconds in all.
_FEW_ROWS = 1_000
_SECONDS_WORTH_LOADING = 1.0

# If an order has more rows than this, one with this many microbatches per rank is searched, and
# lengthened.
_MANY_ROWS = 30_000
_FEW_MICROBATCHES = 3

# Every level of rungs joins this many times as late as the one before, and for every step on a
# rung of the ladder there are several at the limit itself.
_ROUNDS_PER_LEVEL = 3
_STEPS_AT_LIMIT = 4

# Rungs up to this level have a bound of their own; the others use that of the next one above.
_LEVELS_WITH_BOUNDS = 2


def count_rows(problem: SchedulingProblem, seconds: float) -> float:
    """Return the effort, in rows, for these seconds: it depends on nothing else."""
    is_worth = _num_rows(problem) > _FEW_ROWS or seconds >= _SECONDS_WORTH_LOADING
    return seconds * _ROWS_PER_SECOND[is_worth and can_compile()]


def load_loops(problem: SchedulingProblem, rows: float) -> None:
    """Load the compiled loops if they are worth it, so that the clock does not count that."""
    is_worth = _num_rows(problem) > _FEW_ROWS or rows >= _ROWS_PER_SECOND[True]
    if should_compile(is_worth_loading=is_worth):
        _load_loops()


def search_orders(found: BestSoFar, rows: float) -> None:
    """Search for orders with the effort of these rows, and offer those that are better."""
    ladder = _Ladder.of(found.problem)
    for rung, cost in ladder.steps():
        rows -= cost
        if rows < 0 or found.is_optimal:
            return
        if not rung.is_within:
            continue
        if found.is_over(cost):
            return
        order = ladder.step(rung)
        if order is not None:
            found.offer(order, "orders")


@dataclass(frozen=True)
class _Ladder:
    """The rungs of a problem, its limit being the last, and the searches that have begun."""

    problem: SchedulingProblem
    few: SchedulingProblem
    known: Sequence[Schedule]
    rungs: tuple[Rung, ...]
    cost_of: Steps
    is_compiled: bool
    searches: dict[Rung, RungSearch]
    bounds: dict[Rung, float]

    @classmethod
    def of(cls, problem: SchedulingProblem) -> "_Ladder":
        few = problem
        shorter = _FEW_MICROBATCHES * problem.ranks
        if _num_rows(problem) > _MANY_ROWS and problem.microbatches > shorter:
            few = replace(problem, microbatches=shorter)
        return cls(
            problem=problem,
            few=few,
            known=tuple(fixed_schedules(few)),
            rungs=(*find_rungs(problem), Rung(inf, 0, problem.memory, is_within=True)),
            cost_of=Steps(_num_rows(few), _num_rows(problem)),
            is_compiled=should_compile(is_worth_loading=False),
            searches={},
            bounds={},
        )

    def steps(self) -> Iterator[tuple[Rung, float]]:
        """Yield the rungs in the order of their turns, with the rows that each turn counts for.

        Rungs beyond the limit count as well, so that a turn comes as early at every limit.
        """
        turns = dict.fromkeys(self.rungs, 0)
        *ladder, limit = self.rungs
        number = 0
        while True:
            for rung in ladder:
                if number >= _ROUNDS_PER_LEVEL**rung.level - 1:
                    for one in (rung, *[limit] * _STEPS_AT_LIMIT):
                        yield one, self.cost_of.cost(turns[one])
                        turns[one] += 1
            number += 1

    def step(self, rung: Rung) -> Schedule | None:
        """Search on a rung for one step, and return a better schedule if there is one."""
        if rung not in self.searches:
            self.searches[rung] = self._begin(rung)
        order = self.searches[rung].step(self._best_below(rung))
        if order is None:
            return None
        at_rung = replace(self.problem, memory=rung.memory)
        return merge_for_free(Lanes(at_rung).to_schedule(order, "solved"), at_rung)

    def _begin(self, rung: Rung) -> RungSearch:
        whole = replace(self.problem, memory=rung.memory)
        few = replace(self.few, memory=rung.memory)
        builder = Builder(Lanes(whole), self.is_compiled)
        return RungSearch(builder, few, self.known, self._bound(rung), self.cost_of)

    def _bound(self, rung: Rung) -> float:
        above = self.rungs[self.rungs.index(rung) :]
        near = next(one for one in above if one.level <= _LEVELS_WITH_BOUNDS)
        if near not in self.bounds:
            self.bounds[near] = lower_bound(replace(self.few, memory=near.memory))
        return self.bounds[near]

    def _best_below(self, rung: Rung) -> ImprovedOrder | None:
        below = self.rungs[: self.rungs.index(rung)]
        best = (self.searches[one].best for one in below if one in self.searches)
        return min(
            (one for one in best if one is not None),
            key=lambda one: one.built.seconds,
            default=None,
        )


def _num_rows(problem: SchedulingProblem) -> int:
    return Lanes(problem).num_rows


@cache
def _load_loops() -> None:
    """Run every compiled loop once."""
    lanes = Lanes(SchedulingProblem.of(Costs(), Placement.loop(2), 2))
    builder = Builder(lanes, is_compiled=True)
    guess = Guesser(lanes, Random(0), 1.0).one_at_a_time()
    built = builder.build(guess.urgency, guess.policy)
    assert built is not None, "one microbatch at a time always fits"
    shares = iter((0.0, 1.0))
    anneal(lanes, built.order, is_compiled=True, progress=lambda _: next(shares))
