"""Steps in a row: when ranks end if no rank waits between them, and their distance.

The ends of a step depend on the ends of the step before by sums and maxima alone. So the mean
distance of steps is, in the long run, the largest mean over cycles of ranks

  rank 0 --(step 1)--> rank 3 --(step 2)--> rank 0       (longest path of each step) / steps

Policy iteration (Howard) finds it: follow the longest path to every rank's end back to the rank
where it began, take the best cycle among these, shift the ranks accordingly, and run a step again.
It ends when no rank needs more than the cycle's mean from one end to the next, which proves that
no cycle is larger: shifted like this, the ranks repeat their times at exactly that distance.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.costs import Prices
from penstock.errors import DeadlockError
from penstock.ir.actions import Kind
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import ABSENT, Floats, Ints
from penstock.ir.schedule import Schedule
from penstock.sim.program import Program

__all__ = ["Repeated", "fastest_messages", "recorded_prices"]

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
# The share by which sums of seconds may be off.
_ROUNDING = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One step: when each rank ends it, and on which rank the longest path to there began."""

    end: Floats
    origin: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Repeated:
    """A program to be run again and again, with seconds after the end of every rank.

    Lanes begin where they ended, like ranks; a rank with collectives ends when its lane does.
    """

    program: Program
    after: Floats

    def ends(self, begin: Floats) -> Floats:
        """Return when every rank ends a step that it begins at these seconds."""
        lanes = np.full(len(self.program.owner), begin.min())
        return self._step(np.concatenate((begin, lanes))).end[: len(begin)]

    def end_of_all(self, begin: Floats) -> Floats:
        """Return when every rank and lane ends a step that it begins at these seconds."""
        return self._step(begin).end

    def period(self) -> float:
        """Return the mean distance of steps in the long run, if no rank waits between them."""
        begin = np.zeros(self.program.rows.num_ranks)
        while True:
            step = self._step(begin)
            length = step.end - begin[step.origin]
            cycles = _find_cycles(step.origin)
            mean, best = max((float(length[cycle].mean()), cycle[0]) for cycle in cycles)
            if (step.end - begin).max() <= mean + _ROUNDING * np.abs(step.end).max():
                return mean
            begin = _shift(step.origin, length - mean, [cycle[0] for cycle in cycles], best)

    def _step(self, begin: Floats) -> _Step:
        rows, prices = self.program.rows, self.program.prices
        run = self.program.run(begin)
        if not run.is_finished:
            raise DeadlockError(
                "the schedule never finishes, so it has no period; "
                "penstock.check names the actions"
            )
        opens = rows.opening_row()
        last = opens[rows.first[1:] - 1]
        end = run.start[last] + prices.busy[last]
        cause = self._causes(run.start, begin, opens)
        while (before := cause[cause]).tolist() != cause.tolist():
            cause = before
        origin = rows.rank_of_row()[cause[last]].astype(np.int64)
        for lane, owner in enumerate(self.program.owner.tolist(), len(self.after)):
            if owner != ABSENT and end[lane] > end[owner]:
                end[owner], origin[owner] = end[lane], origin[lane]
        end[: len(self.after)] += self.after
        return _Step(end, origin)

    def _causes(self, start: Floats, begin: Floats, opens: Ints) -> NDArray[np.int64]:
        """Return, per opening row, the one that kept it from starting earlier, or itself."""
        graph, prices, first = self.program.graph, self.program.prices, self.program.rows.first
        is_open = opens == np.arange(len(opens))
        free = np.zeros(len(opens))
        cause = np.arange(len(opens))
        later = np.setdiff1d(np.flatnonzero(is_open), first[:-1])
        cause[later] = opens[later - 1]
        free[later] = start[cause[later]] + prices.busy[cause[later]]
        free[first[:-1]] = begin
        arrival = start[graph.need] + prices.duration[graph.need] + prices.lag
        work = opens[np.repeat(np.arange(len(opens)), np.diff(graph.first))]
        latest = np.full(len(opens), -np.inf)
        np.maximum.at(latest, work, arrival)
        is_cause = (arrival == latest[work]) & (arrival > free[work])
        cause[work[is_cause]] = opens[graph.need[is_cause]]
        return cause


def _find_cycles(origin: NDArray[np.int64]) -> list[list[int]]:
    """Return the cycles of ranks that the paths of repeated steps end in.

    >>> _find_cycles(np.array([1, 0, 2, 0]))
    [[0, 1], [2]]
    """
    cycles: list[list[int]] = []
    seen: dict[int, int] = {}
    for first in range(len(origin)):
        rank, path = first, []
        while rank not in seen:
            seen[rank] = first
            path.append(rank)
            rank = int(origin[rank])
        if seen[rank] == first and rank in path:
            cycles.append(path[path.index(rank) :])
    return cycles


def _shift(origin: NDArray[np.int64], excess: Floats, roots: list[int], best: int) -> Floats:
    """Return when each rank begins so that the path to its end is the one found.

    Ranks that do not depend on the best cycle begin so early that they delay nobody else.
    """
    early = 4.0 * (1 + float(np.abs(excess).sum()))
    begin = np.full(len(origin), np.nan)
    for root in roots:
        begin[root] = 0.0 if root == best else -early
    for first in range(len(origin)):
        path = [first]
        while np.isnan(begin[path[-1]]):
            path.append(int(origin[path[-1]]))
        for rank in reversed(path[:-1]):
            begin[rank] = begin[origin[rank]] + excess[rank]
    return begin


def recorded_prices(schedule: Schedule, start: Floats, end: Floats) -> Prices:
    """Return prices from recorded times: what actions took, and the fastest message of each link.

    A message that nobody waited for says nothing about its link, so a transfer may be shorter.
    """
    rows, graph = schedule.rows, build_graph(schedule)
    opens = np.flatnonzero(~rows.joined)
    size = np.diff(np.append(opens, len(rows)))
    done = np.where(rows.is_kind(*_RECEIVES), start, end)
    first = np.minimum.reduceat(start, opens)
    duration = np.repeat(np.maximum.reduceat(done, opens) - first, size)
    used = np.repeat(start, np.diff(graph.first))
    lag = fastest_messages(schedule, graph, used, done[graph.need])
    return Prices(duration, duration, lag, np.zeros(len(rows)))


def fastest_messages(schedule: Schedule, graph: Graph, used: Floats, reached: Floats) -> Floats:
    """Return each need's transfer seconds: those of the fastest message of its link.

    `reached` is when each need was done, and `used` when the row that has it started.
    """
    both = reached.copy()
    is_receive = schedule.rows.is_kind(*_RECEIVES)[graph.need]
    receive = np.flatnonzero(is_receive)
    both[receive] = both[receive + 1] = np.maximum(reached[receive], reached[receive + 1])
    crosses = graph.link != ABSENT
    links, number = np.unique(graph.link[crosses], return_inverse=True)
    fastest = np.full(len(links), np.inf)
    np.minimum.at(fastest, number, np.maximum((used - both)[crosses], 0.0))
    seconds = np.zeros(len(reached))
    seconds[crosses] = fastest[number]
    return seconds
