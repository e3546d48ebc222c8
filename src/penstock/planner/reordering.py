"""Microbatches of different length in the order that suits a schedule, found in milliseconds.

sizes          1 3 2 1 3 2                    neighbours of like size keep ranks from waiting, and
slots          1 2 3 3 2 1                    small ones first and last make the ramps short

A schedule says in which slot each rank does what; which microbatch is in which slot is free. So
the graph of a schedule is built once, and an arrangement costs one run of the clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np
from numpy.typing import NDArray

from penstock.costs import Costs, Prices, price
from penstock.costs.given import costs_or_unit
from penstock.errors import ArgumentError, SizeError
from penstock.ir.clock import run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.untrusted import quote, to_quantity

__all__ = ["Reordering"]

Ints = NDArray[np.int64]

_SEED = 0


@dataclass(frozen=True, eq=False)
class Reordering:
    """A schedule and its costs, prepared to be given the microbatches of each batch.

    Sizes are multiples of the microbatch that `costs` are for. Collectives and shared wires are
    left out while arrangements are compared.

    >>> from penstock.assembly import build
    >>> reordering = Reordering(build("1F1B", ranks=2, microbatches=4), Costs())
    >>> print(reordering.for_sizes([1, 4, 1, 4]))
       rank 0  rank 1
    0  0F0     1F0
    1  0F1     1B0
    2  0B0     1F1
    3  0F3     1B1
    4  0B1     1F3
    5  0F2     1B3
    6  0B3     1F2
    7  0B2     1B2
    """

    schedule: Schedule
    costs: Costs

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", costs_or_unit(self.costs))

    def for_sizes(self, sizes: Sequence[float], *, tries: int = 6) -> Schedule:
        """Return the schedule with each microbatch in the slot where it delays the others least.

        `tries` is how many exchanges of two microbatches are tried after the arrangements that are
        always compared. The result is never slower than the given schedule.
        """
        given = self._read(sizes)
        best, seconds = self._best_of(given, _arrangements(given))
        random = Random(_SEED)
        for _ in range(tries if len(given) > 1 else 0):
            first, second = random.sample(range(len(given)), 2)
            other = best.copy()
            other[[first, second]] = best[[second, first]]
            if (found := self._seconds(given[other])) < seconds:
                best, seconds = other, found
        return self._in_slots(best)

    def _best_of(self, sizes: Floats, arrangements: Iterator[Ints]) -> tuple[Ints, float]:
        found = [(self._seconds(sizes[slots]), at, slots) for at, slots in enumerate(arrangements)]
        seconds, _, slots = min(found, key=lambda entry: entry[:2])
        return slots, seconds

    def _read(self, sizes: Sequence[float]) -> Floats:
        if not isinstance(sizes, Sequence | np.ndarray):
            raise ArgumentError(
                f"sizes must be one number for each microbatch (got {quote(sizes)})"
            )
        numbers = [to_quantity(size) for size in sizes]
        for number, size in zip(numbers, sizes, strict=True):
            if number is None:
                raise ArgumentError(f"a size must be a number from 0 (got {quote(size)})")
        if len(numbers) != self.schedule.microbatches:
            raise SizeError(
                f"sizes must be one for each of the {self.schedule.microbatches} microbatches "
                f"(got {len(numbers)})"
            )
        return np.array(numbers, dtype=np.float64)

    def _seconds(self, slot_sizes: Floats) -> float:
        """Return the end time if the slots have microbatches of these sizes."""
        prices = self._price(slot_sizes)
        run = run_in_order(
            self.schedule.rows,
            self._graph,
            duration=prices.duration,
            busy=prices.busy,
            lag=prices.lag,
        )
        return float((run.start + prices.busy).max())

    def _price(self, slot_sizes: Floats) -> Prices:
        if self.schedule.rows.joined.any():
            # An overlap depends on the sizes of all its members.
            costs = replace(self.costs, microbatch_scale=slot_sizes.tolist())
            return price(costs, self.schedule, self._graph)
        fixed, grows, microbatch = self._prices
        scale = slot_sizes[microbatch]
        return Prices(
            fixed.duration + grows.duration * scale,
            fixed.busy + grows.busy * scale,
            fixed.lag + grows.lag * scale[self._graph.need],
            fixed.host,
        )

    def _in_slots(self, slots: Ints) -> Schedule:
        rows = self.schedule.rows
        numbers = np.append(slots, -1).astype(np.int32)
        return replace(self.schedule, rows=replace(rows, microbatch=numbers[rows.microbatch]))

    @cached_property
    def _graph(self) -> Graph:
        return build_graph(self.schedule)

    @cached_property
    def _prices(self) -> tuple[Prices, Prices, Ints]:
        """What every row costs at size 0, what each size adds, and the slot of each row."""
        costs = self.costs.of_stages(self.schedule)
        none, one = (
            price(replace(costs, microbatch_scale=size), self.schedule, self._graph)
            for size in (0.0, 1.0)
        )
        grows = Prices(
            one.duration - none.duration, one.busy - none.busy, one.lag - none.lag, one.host
        )
        return none, grows, self.schedule.rows.microbatch.astype(np.int64)


def _arrangements(sizes: Floats) -> Iterator[Ints]:
    """Yield the arrangement as given, and both with small ones at the ends and like ones together.

    Sorted ones and those with large ones at the ends were worse for every family.
    """
    rising = np.argsort(sizes, kind="stable")
    hill = np.concatenate((rising[::2], rising[1::2][::-1]))
    yield np.arange(len(sizes))
    yield hill
    yield hill[::-1].copy()
