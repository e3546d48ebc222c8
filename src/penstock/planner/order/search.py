"""The search for a good order: guesses, orders built from them, and the best ones improved.

Its effort is counted in built rows, and the clock only cuts it short: given enough time, the same
problem and effort always give the same order, and more effort never gives a slower one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import inf
from random import Random

from penstock.costs import Costs
from penstock.ir.loops import can_compile
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import Effort
from penstock.planner.order.anneal import MOVES, anneal
from penstock.planner.order.best_so_far import BestSoFar, meets_bound
from penstock.planner.order.builder import Builder, Policy
from penstock.planner.order.climb import ImprovedOrder, climb, try_out
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.greedy import greedy_guesses
from penstock.planner.order.guesses import Guess, Guesser, lengthen, urgency_of
from penstock.planner.order.loops import should_compile
from penstock.planner.order.merge import merge_for_free
from penstock.planner.order.queues import Longs, Queues
from penstock.planner.order.rounds import BestOrders, Budget, round_sizes
from penstock.planner.problem import SchedulingProblem

__all__ = ["ROWS_PER_SECOND", "count_rows", "load_loops", "search_orders"]

# Rows that are surely built in a second, compiled and plain; an order costs as much as these rows
# on top of its own.
ROWS_PER_SECOND = {True: 4_000_000.0, False: 120_000.0}
_ROWS_PER_ORDER = 300

# The rows that a search builds in a second of a plan: its checks take a quarter of that.
_ROWS_OF_A_SECOND = 0.75 * ROWS_PER_SECOND[True]

# The number of random guesses, if they take no more than this share of the effort, and the least
# number. Greedy ones take no more than their own share.
_GUESSES = 60
_SHARE_FOR_GUESSES = 0.2
_FEWEST_GUESSES = 10
_SHARE_FOR_GREEDY = 0.05

# This many guesses of all kinds are tried with the least effort too.
_FEWEST_TRIED = 40

# The number of the best guesses that are tried again, and with how many other policies.
_TRIED_AGAIN = 6
_OTHER_POLICIES = 16

# The rows that annealing times while one is built; the longest order for which it finds
# improvements; and the share of the effort for the search before it.
_TIMED_PER_BUILT = 15
_ROWS_TO_ANNEAL = 2_000
_SHARE_BEFORE_ANNEALING = 0.5

# The compiled loops take about a second to load: worth it if one order has more rows than this, or
# if there are at least this many seconds in all.
_FEW_ROWS = 1_000
_SECONDS_WORTH_LOADING = 1.0

# Where fewer orders than this can be built, guesses are made for a problem with this many
# microbatches per rank, with this share of the effort, and this many of the best are lengthened.
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


def count_rows(problem: SchedulingProblem, seconds: float) -> float:
    """Return the rows that are surely built in these seconds."""
    is_worth = Queues(problem).num_rows > _FEW_ROWS or seconds >= _SECONDS_WORTH_LOADING
    return seconds * ROWS_PER_SECOND[is_worth and can_compile()]


def load_loops(problem: SchedulingProblem, rows: float) -> None:
    """Load the compiled loops if they are worth it, so that the clock does not count that."""
    is_worth = Queues(problem).num_rows > _FEW_ROWS
    is_worth |= rows >= _SECONDS_WORTH_LOADING * ROWS_PER_SECOND[True]
    if should_compile(is_worth_loading=is_worth):
        _run_loops_once()


@cache
def _run_loops_once() -> None:
    queues = Queues(SchedulingProblem.of(Costs(), Placement.loop(2), 2))
    guess = Guesser(queues, Random(0), 1.0).one_at_a_time()
    built = Builder(queues, is_compiled=True).build(guess.urgency, guess.policy)
    assert built is not None, "one microbatch at a time always fits"
    shares = iter((0.0, 1.0))
    anneal(queues, built.order, is_compiled=True, progress=lambda *_: next(shares))


def search_orders(found: BestSoFar, known: Sequence[Schedule], effort: Effort) -> None:
    """Search for orders with this effort, and offer the best.

    `known` are schedules to learn from, whether they keep the limit or not. If there are too many
    rows for many orders, a problem with fewer microbatches shows which guesses are good. If there
    are few, half of the effort goes to moving single actions. See `rounds.py` for what more effort
    adds.
    """
    queues, random, best_orders = Queues(found.problem), Random(0), BestOrders()
    greedy = greedy_guesses(Guesser(queues, random, found.bound))
    budget = Budget(found, effort)
    rows_per_order = queues.num_rows + _ROWS_PER_ORDER
    if found.has_best and not budget.spend(rows_per_order):
        # One order of a very large problem may take longer than all the seconds.
        return
    pool: list[ImprovedOrder] = []
    annealed: list[tuple[float, Longs]] = []
    for rows in round_sizes(_ROWS_OF_A_SECOND, rows_per_order):
        is_small = queues.num_rows <= _ROWS_TO_ANNEAL
        share = _SHARE_BEFORE_ANNEALING if is_small else 1.0
        search = _Search(budget, best_orders, queues, found.bound, share * rows)
        pool += search.guess(known, random)
        if not pool:
            break
        best, pool = search.improve(pool, greedy, random)
        if is_small and not meets_bound(best_orders.seconds, found.bound) and not budget.is_empty:
            start = min((*annealed, (best.built.seconds, best.built.order)), key=_first)
            annealed = [search.anneal(start[1], (1 - share) * rows)]
            if not budget.is_empty:
                pool += search.try_out([_follow(queues, annealed[0][1])])
        budget.end_first_round()
        known = ()
        if budget.is_empty or meets_bound(best_orders.seconds, found.bound):
            break
    _offer(found, queues, best_orders)


def _offer(found: BestSoFar, queues: Queues, best_orders: BestOrders) -> None:
    """Offer the best order, with whole backwards where they cost nothing.

    If its seconds are not what a step costs, offer all that were the best at some time.
    """
    for order in best_orders.orders[-1:] if _is_timed(found.problem) else best_orders.orders:
        schedule = queues.to_schedule(order, "solved")
        found.offer(merge_for_free(schedule, found.problem), "improvements")


def _is_timed(problem: SchedulingProblem) -> bool:
    """Return whether the seconds of a built order are those of its step, and B gains nothing."""
    costs = problem.costs
    is_plain = costs.full_backward is None and not costs.host_action and costs.wires is None
    return is_plain and not costs.has_collectives and problem.boundary != "nothing"


def _follow(queues: Queues, order: Longs) -> Guess:
    """Return the guess that follows an order."""
    start = urgency_of(queues.to_schedule(order, "followed"), queues.problem.costs)
    return Guess(start, _TO_THE_LETTER)


def _first(timed: tuple[float, Longs]) -> float:
    return timed[0]


@dataclass(frozen=True, slots=True)
class _Search:
    """A round of a search at one problem, worth some rows; it ends at a bound, or with the budget.

    `best_orders` is where it leaves orders, if they are of the problem that is searched for.
    """

    budget: Budget
    best_orders: BestOrders | None
    queues: Queues
    bound: float
    rows: float

    def guess(self, known: Sequence[Schedule], random: Random) -> list[ImprovedOrder]:
        """Return candidates from guesses for this problem, or for one that is shorter."""
        problem = self.queues.problem
        few = problem.with_microbatches(_FEW_MICROBATCHES * problem.ranks)
        if self.orders < _FEW_ORDERS and problem.microbatches > few.microbatches:
            return self.try_out(_learn_from(few, self, random))
        return self.screen(known, random)

    def screen(self, known: Sequence[Schedule], random: Random) -> list[ImprovedOrder]:
        """Return candidates from all kinds of guesses, and the best again with other policies."""
        guesser = Guesser(self.queues, random, self.bound)
        candidates = self.try_out(_guess(self, guesser, known))
        if self.budget.is_empty:
            return candidates
        again = _with_other_policies(candidates[:_TRIED_AGAIN], guesser)
        number = max(_FEWEST_TRIED, int(_SHARE_FOR_GUESSES * self.orders))
        return candidates + self.try_out(islice(again, number))

    def try_out(self, guesses: Iterable[Guess]) -> list[ImprovedOrder]:
        """Return candidates from guesses, the best first, until the search is over."""
        most = max(_FEWEST_TRIED, self.orders)
        return try_out(self._builder, guesses, self._until("guesses", most))

    def improve(
        self, candidates: Sequence[ImprovedOrder], greedy: Iterator[Guess], random: Random
    ) -> tuple[ImprovedOrder, list[ImprovedOrder]]:
        """Return the best order from greedy rules or from improving candidates, and the latter.

        Greedy orders are not improved themselves: candidates are improved as far as without them.
        """
        best = min(candidates, key=_seconds)
        if meets_bound(_seconds(best), self.bound) or self.budget.is_empty:
            return best, list(candidates)
        more = self.try_out(islice(greedy, int(_SHARE_FOR_GREEDY * self.orders)))
        until = self._until("improvements", self.orders)
        improved = climb(self._builder, candidates, random, until)
        return min((improved[0], *more), key=_seconds), list(dict.fromkeys(improved))

    def anneal(self, order: Longs, rows: float) -> tuple[float, Longs]:
        """Return the best order that single moves lead to, with its seconds."""
        step = MOVES * self.queues.num_rows / _TIMED_PER_BUILT
        best, moved = inf, -step

        def gone(seconds: float, order: Longs) -> float:
            nonlocal best, moved
            best = seconds
            moved += step
            self._note(seconds, order)
            self._report("single moves")
            if moved >= rows or meets_bound(seconds, self.bound) or not self.budget.spend(step):
                return 1.0
            return moved / rows

        is_compiled = should_compile(is_worth_loading=False)
        found = anneal(self.queues, order, is_compiled=is_compiled, progress=gone)
        return best, found

    @property
    def orders(self) -> float:
        """The number of orders that are worth the effort."""
        return self.rows / self._rows_per_order

    @property
    def _rows_per_order(self) -> float:
        return self.queues.num_rows + _ROWS_PER_ORDER

    @property
    def _builder(self) -> Builder:
        return Builder(self.queues, should_compile(is_worth_loading=False))

    def _note(self, seconds: float, order: Longs) -> None:
        if self.best_orders is not None:
            self.best_orders.record(order, seconds)

    def _report(self, trying: str) -> None:
        seconds = inf if self.best_orders is None else self.best_orders.seconds
        self.budget.found.report(trying, seconds)

    def _until(self, trying: str, orders: float) -> Callable[[ImprovedOrder], bool]:
        left = orders

        def may_go_on(best: ImprovedOrder) -> bool:
            nonlocal left
            left -= 1
            self._note(best.built.seconds, best.built.order)
            self._report(trying)
            if left < 0 or meets_bound(best.built.seconds, self.bound):
                return False
            return self.budget.spend(self._rows_per_order)

        return may_go_on


def _seconds(candidate: ImprovedOrder) -> float:
    return candidate.built.seconds


def _guess(search: _Search, guesser: Guesser, known: Sequence[Schedule]) -> Iterator[Guess]:
    """Yield a guess that always fits, known schedules followed in several ways, and others."""
    yield guesser.one_at_a_time()
    starts = [urgency_of(schedule, search.queues.problem.costs) for schedule in known]
    for policy in (_TO_THE_LETTER, *_MORE_FREELY):
        allowance = policy.allowance * search.queues.cycle
        for start in starts:
            yield Guess(start, policy._replace(allowance=allowance))
    number = _SHARE_FOR_GUESSES * search.orders
    for _ in range(min(_GUESSES, max(_FEWEST_GUESSES, int(number)))):
        yield guesser.guess()


def _learn_from(few: SchedulingProblem, search: _Search, random: Random) -> Iterator[Guess]:
    """Yield a guess that always fits, and the best for fewer microbatches, lengthened."""
    yield Guesser(search.queues, random, search.bound).one_at_a_time()
    shorter = _Search(
        search.budget, None, Queues(few), lower_bound(few), _SHARE_FOR_FEW * search.rows
    )
    screened = shorter.screen(tuple(fixed_schedules(few)), random)
    if search.budget.is_empty and not search.budget.is_first_round:
        return
    for candidate in sorted(screened, key=_seconds)[:_LENGTHENED]:
        yield lengthen(candidate.guess, search.queues.microbatches)


def _with_other_policies(candidates: Sequence[ImprovedOrder], guesser: Guesser) -> Iterator[Guess]:
    for candidate in candidates:
        for _ in range(_OTHER_POLICIES):
            yield replace(candidate.guess, policy=guesser.policy())
