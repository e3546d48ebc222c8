"""Rounds: a search does a little of everything, then about twice as much, and so on.

round      0   1     2        3
rows       |---|-----|--------|--------------|
effort     |----------------------->| ends here

What a round does depends on its number and on what earlier rounds found, and never on how much
effort is left. So a search with more effort begins with all that one with less does: its best
order is never slower. The last round ends where its effort does, wherever that is.

Rounds are a second's worth and five seconds' worth in all, and whole at these.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from penstock.planner.effort_clock import Effort
from penstock.planner.order.best_so_far import BestSoFar
from penstock.planner.order.queues import Longs

__all__ = ["BestOrders", "Budget", "round_sizes"]

# What a search has done after a round, as a multiple of what it had done before.
_GROWTH = 5.0**0.5

# The fewest orders that a first round is worth.
_FEWEST_ORDERS = 10


def round_sizes(rows_of_a_second: float, rows_per_order: float) -> Iterator[float]:
    """Yield the rows of each round, without end; those up to one of them fill a second.

    >>> from itertools import islice
    >>> [round(size) for size in islice(round_sizes(1000.0, 2.0), 5)]
    [40, 49, 111, 247, 553]
    """
    least = _FEWEST_ORDERS * rows_per_order
    total = rows_of_a_second
    while total < least:
        total *= _GROWTH
    while total / _GROWTH >= least:
        total /= _GROWTH
    yield total
    while True:
        yield (_GROWTH - 1) * total
        total *= _GROWTH


@dataclass(slots=True)
class Budget:
    """The effort that a search has left, in rows; the clock may end it earlier.

    The first round is the least that a search does, and only the clock ends it.
    """

    found: BestSoFar
    effort: Effort
    is_empty: bool = False
    is_first_round: bool = True
    _spent: float = 0.0

    def spend(self, rows: float) -> bool:
        """Take rows out for the next work; return whether there were enough."""
        self._spent += rows
        is_spent = self._spent > self.effort.rows and not self.is_first_round
        self.is_empty |= is_spent or self.found.is_over(self.effort.seconds, rows)
        return not self.is_empty

    def end_first_round(self) -> None:
        """Say that the first round is over."""
        self.is_first_round = False
        self.is_empty |= self._spent >= self.effort.rows


@dataclass(slots=True)
class BestOrders:
    """Every order that was the best when it was found, the last being the best of all.

    All are kept, because what a step costs may be less simple than the seconds of an order: then
    an order that is not the last may be the best, and has to be there with more effort too.
    """

    orders: list[Longs] = field(default_factory=list)
    seconds: float = inf

    def record(self, order: Longs, seconds: float) -> None:
        """Keep an order if it is better than those so far."""
        if seconds < self.seconds:
            self.seconds = seconds
            self.orders.append(order.copy())
