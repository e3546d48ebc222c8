"""The states in which a rank can be when it starts a forward, under its byte limit.

Microbatches 0 to j of a rank when F of microbatch j starts in some round:

  0 ........ outer ........ inner ........ j
  past their last I         |              still hold what F took in this round
  (a stash, until W)        past the I of this round, but not past the last one
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir.rows import Bools, Floats
from penstock.planner.bound.visits import Longs, Visits, share

__all__ = ["States", "find_states"]


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """States of ranks (down), one for each number of microbatches past their last I (across).

    Each is the least number of microbatches: `outer` of those past the rank's last I, `inner` of
    those past the I of the round, `deepest` of those past the F of the last round. `work` is the
    least work behind the rank.
    """

    turn: int
    microbatch: int
    outer: Longs
    inner: Longs
    deepest: Longs
    work: Floats
    is_possible: Bools

    def begun(self, visit: int, visits: Visits) -> Longs:
        """Return how many microbatches have begun a visit, at least."""
        if visit <= self.turn:
            return np.full((1, 1), self.microbatch + (visit < self.turn))
        if visit < visits.rounds:
            return self.deepest
        return self.inner if visit <= visits.backward_visit(self.turn) else self.outer


def find_states(visits: Visits, turn: int, microbatch: int, *, every: bool) -> States:
    """Return the states in which ranks can start F of a microbatch in a round (`turn`).

    Those with more microbatches past their last I than need be to have no W forced are never
    better for an early start, so they are left out unless `every` one is asked for.
    """
    outer = _count_outer(visits, microbatch, every=every)
    held_outer = visits.activation[0][:, None] * (microbatch + 1 - outer)
    free = visits.capacity[:, None] - held_outer
    inner_bytes = visits.activation[1 : turn + 1].sum(axis=0)[:, None]
    fits = np.ceil(microbatch + 1 - share(free, inner_bytes, np.inf))
    inner = np.clip(np.maximum(fits, outer), 0, microbatch).astype(np.int64)
    is_possible = (fits <= microbatch) & (free >= 0)
    deepest = inner
    if turn == 0:
        deepest = outer + _must_be_deeper(visits, microbatch, outer)
    work = _least_work(visits, turn, microbatch, outer, inner, free)
    work = work + visits.forward[turn + 1 :].sum(axis=0)[:, None] * (deepest - inner)
    return States(turn, microbatch, outer, inner, deepest, work, is_possible)


def _count_outer(visits: Visits, microbatch: int, *, every: bool) -> Longs:
    """Return, per rank, the numbers of microbatches past their last I to consider."""
    least = np.clip(microbatch + 1 - visits.most_held, 0, microbatch)
    most = np.full(visits.ranks, float(microbatch))
    if not every:
        activation, stash = visits.activation.sum(axis=0), visits.stash.sum(axis=0)
        missing = np.maximum((microbatch + 1) * activation - visits.capacity, 0.0)
        without_weight = np.where(missing > 0, share(missing, activation - stash, np.inf), 0.0)
        most = np.minimum(most, np.ceil(without_weight))
    width = int((most - least).max(initial=0.0)) + 1
    columns = least.astype(np.int64)[:, None] + np.arange(width)
    outer: Longs = np.minimum(columns, microbatch)
    return outer


def _must_be_deeper(visits: Visits, microbatch: int, outer: Longs) -> Longs:
    """Return how many of the microbatches in flight must have completed all their F.

    All under way keep the bytes of their first F until their last I. The first of them that has
    not had its last F will need the bytes of all its F at once, beside those.
    """
    most = microbatch - outer
    deeper = np.ceil(most + 1 - visits.most_held_beside_one[:, None])
    return np.clip(deeper, 0, most).astype(np.int64)


def _least_work(
    visits: Visits, turn: int, microbatch: int, outer: Longs, inner: Longs, free: Floats
) -> Floats:
    """Return the least work that a rank has done: the visits of the state, and W forced by bytes.

    One more microbatch past the I of the round costs work, but gives bytes that W need not give.
    The least is at one of two ends: the fewest that fit, or the fewest for which no W is forced.
    """
    inner_bytes = visits.activation[1 : turn + 1].sum(axis=0)[:, None]
    stash_outer = visits.stash[:turn].sum(axis=0)[:, None] * outer
    stash_inner = visits.stash[turn:].sum(axis=0)[:, None]
    gain = inner_bytes - stash_inner

    def forced(count: Floats | Longs) -> Floats:
        held = stash_outer + stash_inner * count + inner_bytes * (microbatch + 1 - count)
        too_much: Floats = np.maximum(held - free, 0.0)
        return too_much

    each = visits.backward[turn] + (visits.forward + visits.backward)[turn + 1 :].sum(axis=0)
    few = forced(inner)
    at_few = inner * each[:, None] + np.where(
        gain > 0, _weight_seconds(visits, few), _whole_weight_seconds(visits, few)
    )
    unforced = np.clip(inner + share(few, gain, 0.0), inner, microbatch)
    at_unforced = unforced * each[:, None] + _weight_seconds(visits, forced(unforced))
    least = np.where(gain > 0, np.minimum(at_few, at_unforced), at_few)
    before = visits.forward[:turn].sum(axis=0) * (microbatch + 1)
    before = before + visits.forward[turn] * microbatch
    work: Floats = least + before[:, None] + visits.backward[:turn].sum(axis=0)[:, None] * outer
    return work


def _weight_seconds(visits: Visits, too_much: Floats) -> Floats:
    """Return the seconds of W that free these bytes, each byte at the best rate."""
    seconds: Floats = too_much * visits.weight_rate[:, None]
    return seconds


def _whole_weight_seconds(visits: Visits, too_much: Floats) -> Floats:
    """Return the same for whole W, each freeing the most and taking the least of any."""
    count = np.ceil(share(too_much, visits.stash.max(axis=0)[:, None], 0.0))
    by_count = count * visits.weight.min(axis=0)[:, None]
    seconds: Floats = np.maximum(by_count, _weight_seconds(visits, too_much))
    return seconds
