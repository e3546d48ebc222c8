"""Beam search for the best cuts: rank after rank, with the states that are worth keeping.

A rank's ticks and bytes join stages that lie far apart in the chain, so the search takes the
ranks in order and gives all stages of a rank their pieces before the next. Two states that agree
on the cuts around what is left have the same future, and the better one is kept:

V, 3 ranks      cuts  0   1   2   3   4   5   6
after rank 0          |   |               |   |     left: stages 1 to 4, between cuts 1 and 5
after rank 1          |   |   |       |   |   |     left: stages 2 and 3, between cuts 2 and 4

States that break a limit are dropped, and those whose bound does not beat an answer at hand.
At first only the most promising states are kept. The search is repeated with more of them until
none was left out for its number alone, or an answer meets the bound: then it is the best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.planner.partition.chain import UNLIMITED, Chain, CutRanges, Limits, Longs
from penstock.planner.partition.frontier import Frontier
from penstock.planner.partition.goals import Goal
from penstock.planner.partition.steps import CutSequence, CutStep, NewCut

__all__ = ["BestCuts", "NoCuts", "find_cuts"]

# The factor by which each further sweep keeps more states.
_WIDER = 8


@dataclass(frozen=True, slots=True)
class BestCuts:
    """The places of all cuts, what they make of the goal, and whether it is proven the least."""

    cuts: tuple[int, ...]
    value: int
    is_proven: bool = False


@dataclass(frozen=True, slots=True)
class NoCuts:
    """The result that no cuts within the limits exist, or, if not proven, that none were found."""

    is_proven: bool


def find_cuts(
    chain: Chain,
    limits: Limits,
    ranges: CutRanges,
    sequence: CutSequence,
    goal: Goal,
    *,
    effort: int,
    at_hand: BestCuts | None = None,
    width: int = 512,
) -> BestCuts | NoCuts:
    """Look for the cuts within these limits that make the goal smallest.

    The search ends when its answer is proven, or when it has looked at `effort` states. The first
    sweep keeps at most `width` states after each step.
    """
    search = _Search(chain, limits, ranges, sequence, goal)
    best, bound = at_hand, search.bound()
    while effort > 0 and (best is None or best.value > bound):
        sweep = search.sweep(UNLIMITED if best is None else best.value, width, effort)
        best = sweep.answer or best
        if sweep.is_complete:
            return NoCuts(is_proven=True) if best is None else replace(best, is_proven=True)
        effort -= sweep.num_states
        width *= _WIDER
    if best is None:
        return NoCuts(is_proven=False)
    return replace(best, is_proven=best.value <= bound)


@dataclass(frozen=True, slots=True, eq=False)
class _Trace:
    """The states after one step: the state that each came from, and the cuts it has made."""

    parent: Longs
    cuts: dict[int, Longs]


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The result of one sweep over all steps, and whether it left nothing out."""

    answer: BestCuts | None
    is_complete: bool
    num_states: int


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The inputs that all sweeps share."""

    chain: Chain
    limits: Limits
    ranges: CutRanges
    sequence: CutSequence
    goal: Goal

    def bound(self) -> int:
        """Return the least that any answer can be."""
        return int(self.goal.bound(self._start(), self.sequence.ahead)[0])

    def sweep(self, below: int, width: int, effort: int) -> _Sweep:
        """Look for an answer below a value, with at most `width` states after each step."""
        frontier, traces = self._start(), []
        is_complete, num_states = True, 0
        for step in self.sequence.steps:
            frontier = frontier.numbered()
            for new in step.new_cuts:
                low, num_places = self._places(frontier, new)
                num_states += int(num_places.sum())
                if num_states > effort:
                    return _Sweep(None, is_complete=False, num_states=num_states)
                frontier = _make_cut(frontier, new.cut, low, num_places)
            frontier = self._fill(frontier, step, below)
            if len(frontier) > width:
                is_complete = False
                frontier = frontier.take(self._most_promising(frontier, step, width))
            if not len(frontier):
                return _Sweep(None, is_complete, num_states)
            made = {new.cut: frontier.cuts[new.cut] for new in step.new_cuts}
            traces.append(_Trace(frontier.parent, made))
            frontier = _at_rest(frontier, step)
        answer = BestCuts(self._follow(traces), int(frontier.value[0]))
        return _Sweep(answer, is_complete, num_states)

    def _start(self) -> Frontier:
        chain = self.chain
        return Frontier.single(chain.placement.num_stages, chain.num_pieces, self.goal.start)

    def _places(self, frontier: Frontier, new: NewCut) -> tuple[Longs, Longs]:
        """Return, for every state, the first place that the cut may have in it, and how many."""
        cut, ranges = new.cut, self.ranges
        before, after = frontier.cuts[new.before], frontier.cuts[new.after]
        low = np.maximum(before + (cut - new.before), ranges.lowest[cut])
        high = np.minimum(after - (new.after - cut), ranges.highest[cut])
        if new.before == cut - 1:
            high = np.minimum(high, ranges.last[cut - 1, before])
        if new.after == cut + 1:
            low = np.maximum(low, ranges.first[cut, after])
        return low, np.maximum(high - low + 1, 0)

    def _fill(self, frontier: Frontier, step: CutStep, below: int) -> Frontier:
        """Return the states with the pieces of one stage, without dead ends."""
        chain, ranges, stage = self.chain, self.ranges, step.stage
        begin, end = frontier.cuts[stage], frontier.cuts[stage + 1]
        ticks = chain.ticks[end] - chain.ticks[begin]
        frontier = replace(
            frontier,
            value=self.goal.add(frontier, ticks),
            ticks=frontier.ticks + ticks,
            bytes=frontier.bytes + chain.bytes[stage, end] - chain.bytes[stage, begin],
            spread=frontier.spread + np.square(ticks, dtype=np.float64),
        )
        later = list(step.ahead.later_stages)
        fits = end <= ranges.last[stage, begin]
        fits &= frontier.ticks <= self.limits.rank_ticks - ranges.least_ticks[later].sum()
        fits &= (
            frontier.bytes <= self.limits.rank_bytes[step.rank] - ranges.least_bytes[later].sum()
        )
        frontier = frontier.take(np.flatnonzero(fits))
        if step.is_last_of_rank:
            frontier = replace(frontier, value=self.goal.close(frontier, step.rank))
        frontier = frontier.take(np.flatnonzero(self._bound(frontier, step) < below))
        if step.is_last_of_rank:
            frontier = frontier.take(frontier.best_of_equals(step.ahead.cuts))
        return frontier

    def _bound(self, frontier: Frontier, step: CutStep) -> Longs:
        return self.goal.bound(_at_rest(frontier, step), step.ahead)

    def _most_promising(self, frontier: Frontier, step: CutStep, width: int) -> Longs:
        """Return the states with the least bounds, and among equal ones those to try first."""
        guess = self.goal.guess(_at_rest(frontier, step), step.ahead)
        return np.lexsort((guess, self._bound(frontier, step)))[:width]

    def _follow(self, traces: Sequence[_Trace]) -> tuple[int, ...]:
        """Return all cuts of the first of the last states."""
        num_stages = self.chain.placement.num_stages
        cuts, state = {0: 0, num_stages: self.chain.num_pieces}, 0
        for trace in reversed(traces):
            cuts |= {cut: int(places[state]) for cut, places in trace.cuts.items()}
            state = int(trace.parent[state])
        return tuple(cuts[cut] for cut in range(num_stages + 1))


def _make_cut(frontier: Frontier, cut: int, low: Longs, num_places: Longs) -> Frontier:
    """Combine every state with every place of the cut."""
    index = np.repeat(np.arange(len(frontier)), num_places)
    first = np.repeat(np.cumsum(num_places) - num_places, num_places)
    return frontier.take(index).with_cut(cut, low[index] + np.arange(len(index)) - first)


def _at_rest(frontier: Frontier, step: CutStep) -> Frontier:
    """Return the states as later steps see them: a complete rank takes no more pieces."""
    return frontier.without_rank(step.ahead.cuts) if step.is_last_of_rank else frontier
