"""Build an order that keeps the byte limit from how urgent every piece of work is.

First each rank's work is listed, the most urgent first; a W that frees room moves ahead of what
would not fit. Then all ranks run, each by its own clock. A rank takes the first entry of its list
that is ready, and an F only if everything that it overtakes still fits after it:

list      F0 F1 F2 I0 W0 F3 I1 ...        I0 still waits for its inputs: F3 may go before it
order     F0 F1 F2 F3 I0 W0 I1 ...        if I0 and W0 still fit while F3's bytes are held

So no rank ever fills up with work that it cannot finish. Where something more urgent is about to
become ready, a rank may wait for it, or do a W in the meantime; a `Policy` says how long.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.order.loops import PARTS, Columns, compiled, list_by_urgency, run_ranks
from penstock.planner.order.queues import Longs, Queues

__all__ = ["Builder", "Built", "Policy"]

_Result = TypeVar("_Result")


class Policy(NamedTuple):
    """What a rank does when something more urgent is about to become ready.

    The rank may wait for it if it is ready within `patience` times the seconds of what else could
    run. A W may run in the meantime if at most the share `overrun` of it is left by then. A rank
    that has lost more than `allowance` seconds in all no longer waits. If `is_late`, W waits for
    gaps once the rank has no F left.
    """

    patience: float
    overrun: float
    allowance: float
    is_late: bool


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An order of queues, rank after rank, and the start of every queue's microbatches.

    `seconds` is the largest of the ranks' seconds (see `Columns.counts_from_start`), and `mean`
    is their mean.
    """

    order: Longs
    start: Floats
    seconds: float
    mean: float


@dataclass(frozen=True)
class Builder:
    """Builds orders for one problem, again and again; compiled or as plain Python."""

    queues: Queues
    is_compiled: bool

    def build(self, urgency: Floats, policy: Policy) -> Built | None:
        """Return the order for the urgency of each queue's microbatches, or None if it is stuck.

        Small numbers are urgent. In every queue microbatches come in order, so they must rise.
        """
        listing = self._call(list_by_urgency, self._columns, self._give(urgency.ravel()))
        if not listing.fits:
            return None
        finish = self._call(run_ranks, self._columns, listing.queues, policy)
        if not finish.is_finished:
            return None
        of_ranks = np.asarray(finish.seconds)
        seconds, mean = float(of_ranks.max()), float(of_ranks.mean())
        start = np.reshape(finish.start, urgency.shape)
        return Built(np.asarray(finish.order), start, seconds, mean)

    @cached_property
    def _columns(self) -> Columns:
        return self.queues.columns(is_compiled=self.is_compiled)

    def _give(self, column: Any) -> Any:
        """Return a column as the loops take it: an array if compiled, else a list."""
        return column if self.is_compiled else column.tolist()

    def _call(self, loop: Callable[..., _Result], *arguments: Any) -> _Result:
        called: Callable[..., _Result] = compiled(loop, *PARTS) if self.is_compiled else loop
        return called(*arguments)
