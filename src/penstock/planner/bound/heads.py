"""The earliest time at which any schedule can start each action, under the byte limits.

clock of a rank    |F F F F . . . . I F W I F W ...
work behind it      ------->         ------------->    clock >= time lost + work behind it
time lost                   ------->                   at the first I, no more work than fits
                                                       in the capacity is behind the rank
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bound.rounds import Rounds
from penstock.planner.bound.states import States, find_states
from penstock.planner.bound.tails import Tails
from penstock.planner.bound.visits import Longs, Visits, share

__all__ = ["Heads", "find_heads"]

# The states of this many starts are examined in a tenth of a second. Of larger problems, a sample
# of ranks is examined, those most likely to limit the step, and at least this many.
_MANY_STARTS = 10_000
_FEW_RANKS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Per visit, rank and microbatch its earliest start; and the least step that follows."""

    start: Floats
    step: float


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """The bounds so far; the arrays are filled microbatch by microbatch.

    `start` has the earliest start per visit, rank and microbatch. `lost` has, per visit, rank and
    number n, the time that the rank has lost for sure once n microbatches have begun the visit:
    its clock is never less than that plus the work behind it.
    """

    rounds: Rounds
    start: Floats
    lost: Floats

    def note(self, visit: int, microbatch: int, start: Floats) -> None:
        """Take the earliest start of a visit on every rank, and the time lost by then."""
        self.start[visit, :, microbatch] = start
        lost = start - self.rounds.visits.most_done[visit, :, microbatch]
        before = self.lost[visit, :, microbatch]
        self.lost[visit, :, microbatch + 1] = np.maximum(before, lost)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """The ranks whose states are examined, and what visits cost them."""

    ranks: Longs
    visits: Visits


@dataclass(frozen=True, slots=True, eq=False)
class _Starts:
    """The states of the sampled ranks when they start an F, with the earliest time of each.

    `time` is infinite where a state is not possible.
    """

    states: States
    lost: Floats
    time: Floats


def find_heads(rounds: Rounds, tails: Tails) -> Heads:
    """Start every action as early as possible; a step is at least any start plus its tail.

    Microbatches keep their order in every stage and kind: giving the j-th start of each to
    microbatch j changes no time and no byte, and every need is still met. So a rank that starts
    F of microbatch j is in one of few states (`find_states`), and starts no earlier than in the
    best of them: after the last thing that the state has behind it, and after all of it in a row.
    """
    visits = rounds.visits
    shape = (2 * visits.rounds, visits.ranks, visits.microbatches)
    nothing = np.full((*shape[:2], shape[2] + 1), -np.inf)
    known = _Known(rounds, np.full(shape, -np.inf), nothing)
    sampled = _choose_ranks(visits)
    sample = _Sample(sampled, visits.take(sampled))
    bound = 0.0
    for microbatch in range(visits.microbatches):
        for turn in range(visits.rounds):
            starts = _find_starts(known, sample, turn, microbatch)
            _start_forward(known, sample, starts)
            bound = max(bound, _bound_by_states(known, sample, tails, starts))
        for turn in reversed(range(visits.rounds)):
            end = _start_backward(known, turn, microbatch) + visits.backward[turn]
            tail = tails.backward[rounds.stage[turn], microbatch]
            bound = max(bound, float((end + tail).max()))
    return Heads(known.start, bound)


def _choose_ranks(visits: Visits) -> Longs:
    """Return all ranks, or of many a sample: some evenly spread, the busiest, the fullest."""
    most = max(_FEW_RANKS, _MANY_STARTS // (visits.rounds * visits.microbatches))
    if visits.ranks <= most:
        return np.arange(visits.ranks)
    spread = np.linspace(0, visits.ranks - 1, most // 2).astype(np.int64)
    busiest = np.argsort(-visits.whole, kind="stable")[: most // 4]
    capacity = share(visits.capacity, visits.activation.sum(axis=0), np.inf)
    narrow = np.argsort(capacity, kind="stable")[: most // 4]
    return np.unique(np.concatenate((spread, busiest, narrow)))


def _find_starts(known: _Known, sample: _Sample, turn: int, microbatch: int) -> _Starts:
    """Return the states in which F of a microbatch can start, and the earliest time of each.

    A state has visits behind it, each of which ends no earlier than its earliest start allows;
    and the clock shows at least the time lost by then plus the work behind it.
    """
    visits, ranks = sample.visits, sample.ranks[:, None]
    is_last = turn == 0 and microbatch == visits.microbatches - 1
    states = find_states(visits, turn, microbatch, every=is_last)
    latest = np.full(states.work.shape, -np.inf)
    lost = latest
    if turn == 0 and microbatch == 0:
        lost = np.broadcast_to(known.rounds.first_start[ranks], lost.shape)
    for visit, seconds in enumerate(visits.seconds):
        begun = states.begun(visit, visits)
        lost = np.maximum(lost, known.lost[visit, ranks, begun])
        end = known.start[visit, ranks, begun - 1] + seconds[:, None]
        latest = np.maximum(latest, np.where(begun > 0, end, -np.inf))
    time = np.maximum(latest, lost + states.work)
    return _Starts(states, lost, np.where(states.is_possible, time, np.inf))


def _start_forward(known: _Known, sample: _Sample, starts: _Starts) -> None:
    """Start an F on every rank: when a state allows it, its last F is over, its input is there."""
    rounds, turn, microbatch = known.rounds, starts.states.turn, starts.states.microbatch
    start = rounds.descent[turn].copy()
    if microbatch:
        last = known.start[turn, :, microbatch - 1]
        start = np.maximum(start, last + rounds.visits.forward[turn])
    start[sample.ranks] = np.maximum(start[sample.ranks], starts.time.min(axis=1))
    late = start - rounds.descent[turn]
    if turn:
        _delay(late, known.start[turn - 1, :, microbatch] - rounds.descent[turn - 1])
    order = rounds.ranks_in_order[turn]
    known.note(turn, microbatch, _spread_delay(late, order) + rounds.descent[turn])


def _start_backward(known: _Known, turn: int, microbatch: int) -> Floats:
    """Start an I on every rank: after its F and its last I, and when its gradient is there.

    When it starts, all earlier visits of the microbatch are behind the rank.
    """
    rounds, visits = known.rounds, known.rounds.visits
    visit = visits.backward_visit(turn)
    work = (microbatch + 1) * visits.seconds[:visit].sum(axis=0)
    work = work + microbatch * visits.seconds[visit]
    start = known.lost[:visit, :, microbatch + 1].max(axis=0) + work
    turnaround = rounds.turnaround if turn == visits.rounds - 1 else 0.0
    forward_end = known.start[turn, :, microbatch] + visits.forward[turn]
    start = np.maximum(start, forward_end + turnaround)
    if microbatch:
        start = np.maximum(start, known.start[visit, :, microbatch - 1] + visits.backward[turn])
    late = start - rounds.ascent[turn]
    if turn < visits.rounds - 1:
        _delay(late, known.start[visit - 1, :, microbatch] - rounds.ascent[turn + 1])
    order = rounds.ranks_in_order[turn, ::-1]
    known.note(visit, microbatch, _spread_delay(late, order) + rounds.ascent[turn])
    return known.start[visit, :, microbatch]


def _delay(late: Floats, before: Floats) -> None:
    """Delay a round: a microbatch is at least as late there as it left the round before."""
    np.maximum(late, before.max(), out=late)


def _spread_delay(late: Floats, order: Longs) -> Floats:
    """Return, per rank, how late it is: as late as itself or any rank before it in the order."""
    passed = np.empty_like(late)
    passed[order] = np.maximum.accumulate(late[order])
    return passed


def _bound_by_states(known: _Known, sample: _Sample, tails: Tails, starts: _Starts) -> float:
    """Return the step of the best state, on the rank where that is largest.

    From the start of F, the microbatch has its way to go; from the state, the rank has all work
    left that was not behind it: no more than all of what is finished, and of the others no more
    than comes before their last I.
    """
    rounds, visits, states = known.rounds, sample.visits, starts.states
    turn, microbatch = states.turn, states.microbatch
    start = known.start[turn, sample.ranks, microbatch][:, None]
    time = np.maximum(starts.time, start)
    step = time + tails.forward[rounds.stage[turn, sample.ranks], microbatch][:, None]
    everything = (visits.microbatches * visits.whole - rounds.counted_from[sample.ranks])[:, None]
    step = np.maximum(step, starts.lost + everything)
    if turn == 0 and microbatch == visits.microbatches - 1:
        unfinished = (microbatch - states.outer) * visits.most_of_unfinished[:, None]
        done = states.outer * visits.whole[:, None] + unfinished
        step = np.maximum(step, time + everything - done)
    return float(step.min(axis=1).max())
