"""Greedy orders: a rank does what is ready, and W where it would wait.

Each is a guess with simple parameters, and all combinations are tried. What a rank prefers if
several actions are ready, and room is left:

oldest     the oldest microbatch first: I before F, as in 1F1B, with as many F as fit before it
forwards   F before I, until the memory is full
in step    F as many cycles before its I as microbatches fit on that rank, or on the fullest one

W follows its I, or some cycles later, or comes last, and fills gaps before that. A rank that could
start something waits for something better, or does not; and a W in a gap may delay what comes
after it by nothing, by a part of itself, or by all of it.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.order.builder import Policy
from penstock.planner.order.guesses import Guess, Guesser

__all__ = ["greedy_guesses"]

# (patience, overrun, is_late), the most useful first.
_WAYS_TO_WAIT = (
    (0.0, 1.0, True),
    (0.0, 0.0, True),
    (0.5, 0.5, True),
    (1.0, 0.0, True),
    (0.0, 0.5, False),
    (1.0, 0.5, False),
)
# Cycles from I to its W; the last is after everything else.
_DELAYS = (1e6, 0.0, 1.0, 3.0)


def greedy_guesses(guesser: Guesser) -> Iterator[Guess]:
    """Yield all combinations of preferences, delays of W and ways to wait."""
    queues = guesser.queues
    follow = np.arange(queues.microbatches)
    allowances = (1e6 * queues.cycle, max(0.0, guesser.bound - queues.cycle * queues.microbatches))
    for way, delay, (offsets, cycle) in product(_WAYS_TO_WAIT, _DELAYS, _preferences(guesser)):
        patience, overrun, is_late = way
        weight = offsets[1] + queues.problem.backward_input + delay * queues.cycle
        urgency = np.add.outer(np.concatenate((*offsets, weight)), cycle * follow)
        for allowance in allowances if patience else allowances[:1]:
            yield Guess(urgency, Policy(patience, overrun, allowance, is_late))


def _preferences(guesser: Guesser) -> list[tuple[tuple[Floats, Floats], float]]:
    """Return how urgent F and I of the first microbatch are, and how much later the next ones."""
    forward, backward = guesser.straight
    queues = guesser.queues
    whole = float(backward.max()) + queues.cycle
    fullest, each = _fitting(guesser)
    return [
        ((forward, backward), whole),
        ((forward - whole * queues.microbatches, backward), queues.cycle),
        ((backward - queues.cycle * fullest, backward), queues.cycle),
        ((backward - queues.cycle * each, backward), queues.cycle),
    ]


def _fitting(guesser: Guesser) -> tuple[Floats, Floats]:
    """Return, per stage, the microbatches in flight that fit: in proportion, and on its rank."""
    problem = guesser.queues.problem
    forward, backward = guesser.straight
    life = backward + problem.backward_input - forward
    holder = np.array(problem.placement.rank_of_stage)
    most = np.full(problem.ranks, float(problem.microbatches))

    def fill(bytes_per_stage: Floats) -> Floats:
        needed = np.bincount(holder, bytes_per_stage, problem.ranks).astype(np.float64)
        filled: Floats = np.divide(
            problem.usable_capacity, needed, out=most.copy(), where=needed > 0
        )
        return filled

    share = fill(life * problem.activation).min()
    each = fill(problem.activation)[holder]
    both = (np.floor(life * share), np.floor(each))
    fullest, own = (np.clip(count, 1.0, problem.microbatches) for count in both)
    return fullest, own
