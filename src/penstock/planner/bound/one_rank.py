"""The time that one rank needs, given when each action can start and what follows it."""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bound.heads import Heads
from penstock.planner.bound.rounds import Rounds
from penstock.planner.bound.tails import Tails

__all__ = ["TimedAction", "bound_ranks_alone", "run_jobs"]

# Each action costs microseconds; of many ranks only the busiest are examined.
_MANY_ACTIONS = 10_000


@dataclass(frozen=True, slots=True, order=True)
class TimedAction:
    """An action: when it can start at the earliest, its seconds, and what follows its end."""

    head: float
    seconds: float
    tail: float


def bound_ranks_alone(rounds: Rounds, heads: Heads, tails: Tails) -> float:
    """Return the longest time of single ranks, if no other rank ever kept them waiting.

    Actions are not before their heads and have their tails after them in every schedule. On one
    rank alone, always doing what has the longest tail, even if it interrupts something else, is
    the best there is (Jackson's rule): real ranks never interrupt, so they cannot be faster.
    """
    visits = rounds.visits
    busiest = np.argsort(-visits.whole, kind="stable")
    num_ranks = max(1, _MANY_ACTIONS // (3 * visits.rounds * visits.microbatches))
    return max(
        run_jobs(_list_jobs(rounds, heads, tails, rank)) for rank in busiest[:num_ranks].tolist()
    )


def _list_jobs(rounds: Rounds, heads: Heads, tails: Tails, rank: int) -> list[TimedAction]:
    visits = rounds.visits
    jobs: list[TimedAction] = []
    for turn, stage in enumerate(rounds.stage[:, rank].tolist()):
        forward = heads.start[turn, rank]
        backward = heads.start[visits.backward_visit(turn), rank]
        seconds = float(visits.forward[turn, rank])
        jobs += _jobs(forward, seconds, tails.forward[stage] - seconds)
        seconds = float(visits.backward[turn, rank])
        jobs += _jobs(backward, seconds, tails.backward[stage])
        ends = np.full_like(backward, -rounds.counted_from[rank])
        jobs += _jobs(backward + seconds, float(visits.weight[turn, rank]), ends)
    return sorted(jobs)


def _jobs(heads: Floats, seconds: float, tails: Floats) -> list[TimedAction]:
    pairs = zip(heads.tolist(), tails.tolist(), strict=True)
    return [TimedAction(head, seconds, tail) for head, tail in pairs]


def run_jobs(jobs: list[TimedAction]) -> float:
    """Run jobs that are sorted by head; return the latest of their ends plus tails."""
    waiting: list[tuple[float, float]] = []
    clock, longest, number = 0.0, 0.0, 0
    while waiting or number < len(jobs):
        if not waiting:
            clock = max(clock, jobs[number].head)
        while number < len(jobs) and jobs[number].head <= clock:
            heappush(waiting, (-jobs[number].tail, jobs[number].seconds))
            number += 1
        coming = jobs[number].head if number < len(jobs) else inf
        tail, seconds = heappop(waiting)
        if clock + seconds > coming:
            heappush(waiting, (tail, clock + seconds - coming))
            clock = coming
        else:
            clock += seconds
            longest = max(longest, clock - tail)
    return longest
