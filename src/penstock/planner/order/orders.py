"""From how urgent every piece of work is to an order that keeps the bytes, built in time.

First each rank's work is put in line, the most urgent first; a W that makes room moves ahead of
what would not fit. Then all ranks run, each as its own clock says. A rank takes the first in its
line that is ready, and an F only if everything that it overtakes still fits after it:

line      F0 F1 F2 I0 W0 F3 I1 ...        the inputs of I0 are not there yet: F3 may go before it
order     F0 F1 F2 F3 I0 W0 I1 ...        if I0 and W0 still fit with F3's bytes taken

So no rank ever fills up with work that it cannot finish. Where something more urgent is about to
come, a rank may wait for it, or do a W in the meantime; a `Policy` says how long.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.order.lanes import Lanes, Longs
from penstock.planner.order.loops import compile_loop, line_up, run_ranks

__all__ = ["Builder", "Built", "Policy"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank does when something more urgent is about to come.

    It may be waited for if it comes within `patience` times what else could run. A W may run in
    the meantime if at most the `overrun` part of it is left by then. A rank that has lost more
    than `allowance` seconds in all waits no longer. If `is_late`, W waits for gaps once no F is
    left on the rank.
    """

    patience: float
    overrun: float
    allowance: float
    is_late: bool


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An order of lanes, rank after rank, and the start of every lane's microbatches.

    `makespan` is the longest time of a rank from first to last, `mean` the mean over the ranks.
    """

    order: Longs
    start: Floats
    makespan: float
    mean: float


@dataclass(frozen=True)
class Builder:
    """Builds orders for one problem, again and again; compiled or as plain Python."""

    lanes: Lanes
    is_compiled: bool

    def build(self, urgency: Floats, policy: Policy) -> Built | None:
        """An order from the urgency of each lane's microbatches, or nothing if it gets stuck.

        Small numbers are urgent. In every lane microbatches come in order, so they must rise.
        """
        rows, ranks = self.lanes.num_rows, self.lanes.problem.ranks
        line, order = (self._column(rows, np.int64) for _ in range(2))
        if not self._call(line_up, *self._sizes, self._give(urgency.ravel()), line):
            return None
        waits = (policy.patience, policy.overrun, policy.allowance, policy.is_late)
        start, span = self._column(rows), self._column(ranks)
        results = (*self._scratch(), order, start, span)
        if not self._call(run_ranks, *self._sizes, *self._costs, line, *waits, *results):
            return None
        spans = np.asarray(span)
        makespan, mean = float(spans.max()), float(spans.mean())
        return Built(np.asarray(order), np.reshape(start, urgency.shape), makespan, mean)

    def _scratch(self) -> Iterator[Any]:
        """The columns that `run_ranks` writes to, in its order."""
        rows, ranks = self.lanes.num_rows, self.lanes.problem.ranks
        ready = np.full(rows, inf)
        ready[: self.lanes.microbatches] = 0.0
        yield self._give(ready)
        yield from (self._column(rows, kind) for kind in (np.int64, np.float64, np.bool_))
        yield self._column(3 * self.lanes.stages, np.int64)
        kinds = (np.int64, np.int64, np.bool_, np.float64, np.float64, np.float64)
        yield from (self._column(ranks, kind) for kind in kinds)

    @cached_property
    def _sizes(self) -> tuple[Any, ...]:
        lanes = self.lanes
        columns = (*lanes.of_rank, lanes.change, lanes.room)
        return (lanes.microbatches, lanes.stages, *map(self._give, columns))

    @cached_property
    def _costs(self) -> tuple[Any, ...]:
        lanes = self.lanes
        columns = (lanes.holder, lanes.seconds, lanes.follower, lanes.lag)
        return tuple(map(self._give, columns))

    def _column(self, size: int, kind: type = np.float64) -> Any:
        return self._give(np.zeros(size, dtype=kind))

    def _give(self, column: Any) -> Any:
        """A column as the loops take it: compiled ones arrays, others lists."""
        return column if self.is_compiled else column.tolist()

    def _call(self, loop: Callable[..., bool], *arguments: Any) -> bool:
        return (compile_loop(loop) if self.is_compiled else loop)(*arguments)
