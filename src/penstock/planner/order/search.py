"""The search for a good order: guesses, orders built from them, and the best ones improved.

It is counted in built rows, and the clock only cuts it short: where there is time enough, the same
problem always gives the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.anneal import MOVES, anneal
from penstock.planner.order.best_so_far import Race, is_as_fast
from penstock.planner.order.builder import Builder, Policy
from penstock.planner.order.climb import ImprovedOrder, climb, try_out
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.guesses import Guess, Guesser, lengthen, urgency_of
from penstock.planner.order.lanes import Lanes, Longs
from penstock.planner.order.loops import should_compile
from penstock.planner.order.merge import merge_for_free
from penstock.planner.problem import SchedulingProblem

__all__ = ["search_orders"]

# Building does at least so many rows in a second, compiled and plain; beside its rows, an order
# costs as much as these.
_ROWS_PER_SECOND = {True: 4_000_000, False: 120_000}
_ROWS_PER_ORDER = 300

# So many guesses are made, if they take no more than this share of the time, but at least some.
_GUESSES = 60
_SHARE_FOR_GUESSES = 0.2
_FEWEST_GUESSES = 10

# The best of these are tried again with so many other policies.
_TRIED_AGAIN = 6
_OTHER_POLICIES = 16

# Annealing does at least so many rows in a second, compiled and plain. Up to so many rows of an
# order it finds something; the search before it gets this share of the time then.
_ANNEALED_PER_SECOND = {True: 60_000_000, False: 1_000_000}
_ROWS_TO_ANNEAL = 2_000
_SHARE_BEFORE_ANNEALING = 0.5

# The compiled loops take about a second to load: worth it if one order has more rows than these,
# or if there are at least so many seconds in all.
_FEW_ROWS = 1_000
_SECONDS_WORTH_LOADING = 2.0

# Where fewer orders than these can be built, guesses are made for a problem with so few
# microbatches per rank, in this share of the time, and the best are lengthened.
_FEW_ORDERS = 400
_FEW_MICROBATCHES = 3
_SHARE_FOR_FEW = 0.7
_LENGTHENED = 12

# How the order of a known schedule is followed: to the letter, or less and less so. Allowances are
# in cycles.
_TO_THE_LETTER = Policy(1.0, 0.0, inf, is_late=False)
_MORE_FREELY = (
    Policy(1.0, 0.0, 3.0, is_late=True),
    Policy(0.5, 0.5, 2.0, is_late=True),
    Policy(0.0, 1.0, 0.0, is_late=True),
)


def search_orders(race: Race, known: Sequence[Schedule], seconds: float) -> None:
    """Look for orders until the race has gone on for so many seconds, and offer the best.

    `known` are schedules to learn from, whether they keep the limit or not. If there are too many
    rows for many orders, a problem with fewer microbatches shows which guesses are good. If there
    are few, the rest of the time goes to moving single actions.
    """
    lanes, random = Lanes(race.problem), Random(0)
    is_small = lanes.num_rows <= _ROWS_TO_ANNEAL
    share = _SHARE_BEFORE_ANNEALING if is_small else 1.0
    search = _Search(race, lanes, race.bound, share * seconds)
    few = replace(race.problem, microbatches=_FEW_MICROBATCHES * race.problem.ranks)
    is_short = search.count_orders(is_compiled=True) < _FEW_ORDERS
    if is_short and race.problem.microbatches > few.microbatches:
        candidates = search.try_out(_learn_from(few, search, random))
    else:
        candidates = search.screen(known, random)
    if not candidates:
        return
    order = search.improve(candidates, random).built.order
    _offer(race, lanes, order)
    if is_small and not race.is_won:
        is_compiled = should_compile(is_worth_loading=False)
        order = anneal(lanes, order, is_compiled=is_compiled, progress=_way(race, lanes, seconds))
        _offer(race, lanes, order)


def _offer(race: Race, lanes: Lanes, order: Longs) -> None:
    """Offer an order, with whole backwards where they cost nothing."""
    schedule = lanes.to_schedule(order, "solved")
    race.offer(merge_for_free(schedule, race.problem), "improvements")


def _way(race: Race, lanes: Lanes, seconds: float) -> Callable[[float], float]:
    """Which part of annealing is over: by its rows; all of it at the bound or when time is up."""
    is_compiled = should_compile(is_worth_loading=False)
    most = (1 - _SHARE_BEFORE_ANNEALING) * seconds * _ANNEALED_PER_SECOND[is_compiled]
    rows = 0.0

    def gone(makespan: float) -> float:
        nonlocal rows
        race.report("single moves", makespan)
        rows += MOVES * lanes.num_rows
        is_over = race.gone >= seconds or is_as_fast(makespan, race.bound)
        return 1.0 if is_over else rows / most

    return gone


@dataclass(frozen=True, slots=True)
class _Search:
    """A search that ends at a bound, or so many seconds into a race.

    The seconds are counted in rows; on a slow machine, the clock ends them.
    """

    race: Race
    lanes: Lanes
    bound: float
    seconds: float

    def screen(self, known: Sequence[Schedule], random: Random) -> list[ImprovedOrder]:
        """Candidates from all kinds of guesses, the best of them again with other policies."""
        guesser = Guesser(self.lanes, random, self.bound)
        candidates = self.try_out(_guess(self, guesser, known))
        again = _with_other_policies(candidates[:_TRIED_AGAIN], guesser)
        return candidates + self.try_out(again)

    def try_out(self, guesses: Iterable[Guess]) -> list[ImprovedOrder]:
        """Candidates from guesses, the best first, until the search is over."""
        is_large = self.lanes.num_rows > _FEW_ROWS
        builder = Builder(self.lanes, should_compile(is_worth_loading=is_large))
        return try_out(builder, guesses, self._until("guesses", inf))

    def improve(self, candidates: Sequence[ImprovedOrder], random: Random) -> ImprovedOrder:
        """The best that comes of candidates."""
        is_long = self.race.seconds >= _SECONDS_WORTH_LOADING
        builder = Builder(self.lanes, should_compile(is_worth_loading=is_long))
        orders = self.count_orders(is_compiled=builder.is_compiled)
        return climb(builder, candidates, random, self._until("improvements", orders))

    def count_orders(self, *, is_compiled: bool) -> float:
        """How many orders can surely be built in the time there is."""
        rows = self.seconds * _ROWS_PER_SECOND[is_compiled]
        return rows / (self.lanes.num_rows + _ROWS_PER_ORDER)

    def _until(self, trying: str, orders: float) -> Callable[[ImprovedOrder], bool]:
        left = orders

        def may_go_on(best: ImprovedOrder) -> bool:
            nonlocal left
            left -= 1
            is_whole = self.lanes.problem is self.race.problem
            self.race.report(trying, best.built.makespan if is_whole else inf)
            is_over = left < 0 or self.race.gone >= self.seconds
            return not is_over and not is_as_fast(best.built.makespan, self.bound)

        return may_go_on


def _guess(search: _Search, guesser: Guesser, known: Sequence[Schedule]) -> Iterator[Guess]:
    """What always fits, known schedules followed in several ways, and free guesses."""
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
    """What always fits, and what is best for a problem with fewer microbatches, lengthened."""
    yield Guesser(search.lanes, random, search.bound).one_at_a_time()
    seconds = _SHARE_FOR_FEW * search.seconds
    shorter = _Search(search.race, Lanes(few), lower_bound(few), seconds)
    found = shorter.screen(tuple(fixed_schedules(few)), random)
    for candidate in sorted(found, key=lambda candidate: candidate.built.makespan)[:_LENGTHENED]:
        yield lengthen(candidate.guess, search.lanes.microbatches)


def _with_other_policies(candidates: Sequence[ImprovedOrder], guesser: Guesser) -> Iterator[Guess]:
    for candidate in candidates:
        for _ in range(_OTHER_POLICIES):
            yield replace(candidate.guess, policy=guesser.policy())
