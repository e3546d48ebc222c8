"""The search for a good order: guesses, orders built from them, and the best ones improved.

Its effort is counted in built rows, and the clock only cuts it short: given enough time, the same
problem always gives the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.anneal import MOVES, anneal
from penstock.planner.order.best_so_far import BestSoFar, meets_bound
from penstock.planner.order.builder import Builder, Policy
from penstock.planner.order.climb import ImprovedOrder, climb, try_out
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.guesses import Guess, Guesser, lengthen, urgency_of
from penstock.planner.order.lanes import Lanes, Longs
from penstock.planner.order.loops import should_compile
from penstock.planner.order.merge import merge_for_free
from penstock.planner.problem import SchedulingProblem

__all__ = ["search_orders"]

# Rows that are surely built in a second, compiled and plain; an order costs as much as these rows
# on top of its own.
_ROWS_PER_SECOND = {True: 4_000_000, False: 120_000}
_ROWS_PER_ORDER = 300

# The number of guesses, if they take no more than this share of the time, and the least number.
_GUESSES = 60
_SHARE_FOR_GUESSES = 0.2
_FEWEST_GUESSES = 10

# The number of the best guesses that are tried again, and with how many other policies.
_TRIED_AGAIN = 6
_OTHER_POLICIES = 16

# Rows that annealing surely times in a second, compiled and plain; the longest order for which it
# finds improvements; and the share of the time for the search before it.
_ANNEALED_PER_SECOND = {True: 60_000_000, False: 1_000_000}
_ROWS_TO_ANNEAL = 2_000
_SHARE_BEFORE_ANNEALING = 0.5

# The compiled loops take about a second to load: worth it if one order has more rows than this, or
# if there are at least this many seconds in all.
_FEW_ROWS = 1_000
_SECONDS_WORTH_LOADING = 2.0

# Where fewer orders than this can be built, guesses are made for a problem with this many
# microbatches per rank, in this share of the time, and this many of the best are lengthened.
_FEW_ORDERS = 400
_FEW_MICROBATCHES = 3
_SHARE_FOR_FEW = 0.7
_LENGTHENED = 12

# How closely the order of a known schedule is followed: exactly, or less and less so. Allowances
# are in cycles.
_TO_THE_LETTER = Policy(1.0, 0.0, inf, is_late=False)
_MORE_FREELY = (
    Policy(1.0, 0.0, 3.0, is_late=True),
    Policy(0.5, 0.5, 2.0, is_late=True),
    Policy(0.0, 1.0, 0.0, is_late=True),
)


def search_orders(found: BestSoFar, known: Sequence[Schedule], seconds: float) -> None:
    """Search for orders until the given second of the search, and offer the best.

    `known` are schedules to learn from, whether they keep the limit or not. If there are too many
    rows for many orders, a problem with fewer microbatches shows which guesses are good. If there
    are few, the rest of the time goes to moving single actions.
    """
    lanes, random = Lanes(found.problem), Random(0)
    is_small = lanes.num_rows <= _ROWS_TO_ANNEAL
    share = _SHARE_BEFORE_ANNEALING if is_small else 1.0
    search = _Search(found, lanes, found.bound, share * seconds)
    few = found.problem.with_microbatches(_FEW_MICROBATCHES * found.problem.ranks)
    is_short = search.count_orders(is_compiled=True) < _FEW_ORDERS
    if is_short and found.problem.microbatches > few.microbatches:
        candidates = search.try_out(_learn_from(few, search, random))
    else:
        candidates = search.screen(known, random)
    if not candidates:
        return
    order = search.improve(candidates, random).built.order
    _offer(found, lanes, order)
    if is_small and not found.is_optimal:
        is_compiled = should_compile(is_worth_loading=False)
        order = anneal(
            lanes, order, is_compiled=is_compiled, progress=_share_over(found, lanes, seconds)
        )
        _offer(found, lanes, order)


def _offer(found: BestSoFar, lanes: Lanes, order: Longs) -> None:
    """Offer an order, with whole backwards where they cost nothing."""
    schedule = lanes.to_schedule(order, "solved")
    found.offer(merge_for_free(schedule, found.problem), "improvements")


def _share_over(found: BestSoFar, lanes: Lanes, seconds: float) -> Callable[[float], float]:
    """Return a function for the share of annealing that is over: all of it at the bound."""
    is_compiled = should_compile(is_worth_loading=False)
    most = (1 - _SHARE_BEFORE_ANNEALING) * seconds * _ANNEALED_PER_SECOND[is_compiled]
    rows = 0.0

    def gone(best: float) -> float:
        nonlocal rows
        found.report("single moves", best)
        rows += MOVES * lanes.num_rows
        if rows >= most or meets_bound(best, found.bound):
            return 1.0
        return 1.0 if found.is_over(seconds) else rows / most

    return gone


@dataclass(frozen=True, slots=True)
class _Search:
    """A search that ends at a bound, or at the given second.

    Seconds are counted in rows; on a slow machine, the clock ends the search.
    """

    found: BestSoFar
    lanes: Lanes
    bound: float
    seconds: float

    def screen(self, known: Sequence[Schedule], random: Random) -> list[ImprovedOrder]:
        """Return candidates from all kinds of guesses, and the best again with other policies."""
        guesser = Guesser(self.lanes, random, self.bound)
        candidates = self.try_out(_guess(self, guesser, known))
        again = _with_other_policies(candidates[:_TRIED_AGAIN], guesser)
        return candidates + self.try_out(again)

    def try_out(self, guesses: Iterable[Guess]) -> list[ImprovedOrder]:
        """Return candidates from guesses, the best first, until the search is over."""
        is_large = self.lanes.num_rows > _FEW_ROWS
        builder = Builder(self.lanes, should_compile(is_worth_loading=is_large))
        return try_out(builder, guesses, self._until("guesses", inf))

    def improve(self, candidates: Sequence[ImprovedOrder], random: Random) -> ImprovedOrder:
        """Return the best order that comes from improving candidates."""
        is_long = self.found.seconds >= _SECONDS_WORTH_LOADING
        builder = Builder(self.lanes, should_compile(is_worth_loading=is_long))
        orders = self.count_orders(is_compiled=builder.is_compiled)
        return climb(builder, candidates, random, self._until("improvements", orders))

    def count_orders(self, *, is_compiled: bool) -> float:
        """Return the number of orders that can surely be built in the time."""
        rows = self.seconds * _ROWS_PER_SECOND[is_compiled]
        return rows / (self.lanes.num_rows + _ROWS_PER_ORDER)

    def _until(self, trying: str, orders: float) -> Callable[[ImprovedOrder], bool]:
        left = orders

        def may_go_on(best: ImprovedOrder) -> bool:
            nonlocal left
            left -= 1
            is_whole = self.lanes.problem is self.found.problem
            self.found.report(trying, best.built.seconds if is_whole else inf)
            if left < 0 or meets_bound(best.built.seconds, self.bound):
                return False
            return not self.found.is_over(self.seconds)

        return may_go_on


def _guess(search: _Search, guesser: Guesser, known: Sequence[Schedule]) -> Iterator[Guess]:
    """Yield a guess that always fits, known schedules followed in several ways, and others."""
    yield guesser.one_at_a_time()
    starts = [urgency_of(schedule, search.lanes.problem.costs) for schedule in known]
    for policy in (_TO_THE_LETTER, *_MORE_FREELY):
        allowance = policy.allowance * search.lanes.cycle
        for start in starts:
            yield Guess(start, policy._replace(allowance=allowance))
    number = _SHARE_FOR_GUESSES * search.count_orders(is_compiled=True)
    for _ in range(min(_GUESSES, max(_FEWEST_GUESSES, int(number)))):
        yield guesser.guess()


def _learn_from(few: SchedulingProblem, search: _Search, random: Random) -> Iterator[Guess]:
    """Yield a guess that always fits, and the best for fewer microbatches, lengthened."""
    yield Guesser(search.lanes, random, search.bound).one_at_a_time()
    seconds = _SHARE_FOR_FEW * search.seconds
    shorter = _Search(search.found, Lanes(few), lower_bound(few), seconds)
    screened = shorter.screen(tuple(fixed_schedules(few)), random)
    for candidate in sorted(screened, key=lambda candidate: candidate.built.seconds)[:_LENGTHENED]:
        yield lengthen(candidate.guess, search.lanes.microbatches)


def _with_other_policies(candidates: Sequence[ImprovedOrder], guesser: Guesser) -> Iterator[Guess]:
    for candidate in candidates:
        for _ in range(_OTHER_POLICIES):
            yield replace(candidate.guess, policy=guesser.policy())
