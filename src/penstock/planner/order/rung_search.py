"""The search on one rung of the ladder, in steps that do not depend on how many there will be."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from random import Random

from penstock.ir.schedule import Schedule
from penstock.planner.order.anneal import MOVES, anneal
from penstock.planner.order.best_so_far import meets_bound
from penstock.planner.order.builder import Builder, Built, Policy
from penstock.planner.order.climb import ImprovedOrder, climb, try_out
from penstock.planner.order.greedy import greedy_guesses
from penstock.planner.order.guesses import Guess, Guesser, lengthen, urgency_of
from penstock.planner.order.lanes import Lanes, Longs
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate

__all__ = ["RungSearch", "Steps"]

# An order costs as much as this number of rows on top of its own.
_ROWS_PER_ORDER = 300

# The most orders that a step builds, and the rows for which it builds at least two.
_ORDERS, _ROWS_OF_STEP = 16, 300_000

# The number of random guesses, after those that are always made.
_RANDOM_GUESSES = 80

# The longest order that annealing improves, every how many steps it does, and how many rows it
# times while one is built. Each time it takes longer.
_ROWS_TO_ANNEAL = 2_000
_STEPS_PER_ANNEALING = 4
_TIMED_PER_BUILT = 12
_ROUNDS_OF_MOVES = 6

# How closely the order of a known schedule is followed: exactly, or less and less so. Allowances
# are in cycles.
_TO_THE_LETTER = Policy(1.0, 0.0, inf, is_late=False)
_FOLLOWED = (
    _TO_THE_LETTER,
    Policy(1.0, 0.0, 3.0, is_late=True),
    Policy(0.5, 0.5, 2.0, is_late=True),
    Policy(0.0, 1.0, 0.0, is_late=True),
)


@dataclass(frozen=True, slots=True)
class Steps:
    """What the steps of a search do and cost, by their number; the same on every rung.

    `rows` are those of an order that is searched, `whole` those of one for all microbatches.
    """

    rows: int
    whole: int

    @property
    def orders(self) -> int:
        """The orders that a step builds."""
        return max(2, min(_ORDERS, _ROWS_OF_STEP // (self.rows + _ROWS_PER_ORDER)))

    def annealings(self, number: int) -> int:
        """Return how often a step makes a round of moves; 0 if it does not anneal."""
        is_small = self.rows == self.whole <= _ROWS_TO_ANNEAL
        count, rest = divmod(number + 1, _STEPS_PER_ANNEALING)
        return _ROUNDS_OF_MOVES * count if is_small and not rest else 0

    def cost(self, number: int) -> float:
        """Return the rows that a step counts for."""
        built = self.orders * (self.rows + _ROWS_PER_ORDER)
        lengthened = self.whole + _ROWS_PER_ORDER if self.rows != self.whole else 0
        return built + lengthened + self.annealings(number) * MOVES * self.rows / _TIMED_PER_BUILT


class RungSearch:
    """A search at one limit: guesses, then changes to the best of them, then single moves.

    `few` is the problem on which it searches, with fewer microbatches if there are too many, and
    `known` are schedules of it to learn from.
    """

    def __init__(
        self,
        whole: Builder,
        few: SchedulingProblem,
        known: Sequence[Schedule],
        bound: float,
        steps: Steps,
    ) -> None:
        self._whole, self._bound, self._steps = whole, bound, steps
        is_whole = few.microbatches == whole.lanes.microbatches
        self._builder = whole if is_whole else Builder(Lanes(few), whole.is_compiled)
        self._random = Random(0)
        self._guesser = Guesser(self._builder.lanes, self._random, bound)
        self._guesses = _guess(self._guesser, known)
        self._pool: list[ImprovedOrder] = []
        self._number = 0
        self._handed_out = inf

    @property
    def best(self) -> ImprovedOrder | None:
        """The fastest order so far."""
        return min(self._pool, key=lambda one: one.built.seconds, default=None)

    @property
    def is_done(self) -> bool:
        """Whether no order on this rung can be faster than the best."""
        best = self.best
        return best is not None and meets_bound(best.built.seconds, self._bound)

    def step(self, lower: ImprovedOrder | None) -> Longs | None:
        """Search for one step, and return an order of all microbatches if there is a better one.

        `lower` is the best of a lower rung.
        """
        self._take(lower)
        if not self.is_done:
            self._search()
        self._number += 1
        best = self.best
        if best is None or best.built.seconds >= self._handed_out:
            return None
        self._handed_out = best.built.seconds
        return best.built.order if self._builder is self._whole else self._lengthen(best)

    def _take(self, lower: ImprovedOrder | None) -> None:
        best = self.best
        if lower is not None and (best is None or lower.built.seconds < best.built.seconds):
            self._pool.append(lower)

    def _search(self) -> None:
        orders = self._steps.orders
        guesses = list(islice(self._guesses, (orders + 1) // 2))
        if self._pool:
            guesses += [self._with_other_policy() for _ in range(orders // 4)]
        self._pool += try_out(self._builder, guesses)
        if self._pool:
            self._pool = climb(self._builder, self._pool, self._random, orders - len(guesses))
        rounds = self._steps.annealings(self._number)
        if rounds and self._pool and not self.is_done:
            self._anneal(rounds)

    def _with_other_policy(self) -> Guess:
        """Return the guess of a good candidate with another policy."""
        number = min(int(self._random.expovariate(0.7)), len(self._pool) - 1)
        return replace(self._pool[number].guess, policy=self._guesser.policy())

    def _anneal(self, rounds: int) -> None:
        best = self.best
        assert best is not None, "only orders can be annealed"
        made = 0

        def progress(seconds: float) -> float:
            nonlocal made
            made += 1
            return 1.0 if meets_bound(seconds, self._bound) else (made - 1) / rounds

        order = anneal(
            self._builder.lanes,
            best.built.order,
            is_compiled=self._builder.is_compiled,
            progress=progress,
            seed=self._number + 1,
        )
        lanes = self._builder.lanes
        schedule = lanes.to_schedule(order, "annealed")
        start = urgency_of(schedule, lanes.problem.costs)
        timeline = simulate(schedule, lanes.problem.costs)
        is_to_end = lanes.problem.lasts_until_all_end
        seconds = timeline.end_time if is_to_end else timeline.longest_span
        built = Built(order, start, seconds, seconds)
        self._pool.append(ImprovedOrder(Guess(start, _TO_THE_LETTER), built))

    def _lengthen(self, best: ImprovedOrder) -> Longs | None:
        guess = lengthen(best.guess, self._whole.lanes.microbatches)
        built = self._whole.build(guess.urgency, guess.policy)
        return None if built is None else built.order


def _guess(guesser: Guesser, known: Sequence[Schedule]) -> Iterator[Guess]:
    """Yield a guess that always fits, known schedules followed in several ways, and others.

    Greedy and random guesses take turns.
    """
    yield guesser.one_at_a_time()
    starts = [urgency_of(schedule, guesser.lanes.problem.costs) for schedule in known]
    for policy in _FOLLOWED:
        allowance = policy.allowance * guesser.lanes.cycle
        for start in starts:
            yield Guess(start, policy._replace(allowance=allowance))
    drawn = (guesser.guess() for _ in range(_RANDOM_GUESSES))
    greedy = greedy_guesses(guesser)
    for guess in greedy:
        yield guess
        yield from islice(drawn, 1)
    yield from drawn
