"""Hill climbing: change how urgent some work is, build the order again, keep what helps.

urgency    stage 0   F F F F   I W I W I W      a change takes one kind of work of neighbouring
           stage 1     F F F F I W I W I        stages within an interval, and makes it more
           stage 2       F[F F]F I W I W I      or less urgent; the order is built again, so
           stage 3         [F F]F I W I W       that everything else falls into place around it
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.order.builder import Builder, Built, Policy
from penstock.planner.order.guesses import Guess

__all__ = ["ImprovedOrder", "climb", "try_out"]

# The number of candidates worked on side by side; better ones are chosen more often.
_SIDE_BY_SIDE = 6

# Between orders of equal seconds, the one that leaves more ranks more time is easier to improve.
_WEIGHT_OF_MEAN = 0.005


# The share of changes that are of policy; the others are of urgency.
_SHARE_OF_POLICY = 0.35


@dataclass(frozen=True, slots=True)
class ImprovedOrder:
    """A guess and the order that was built from it."""

    guess: Guess
    built: Built


def _seconds(candidate: ImprovedOrder) -> float:
    return candidate.built.seconds


def _score(candidate: ImprovedOrder) -> float:
    return candidate.built.seconds + _WEIGHT_OF_MEAN * candidate.built.mean


def try_out(
    builder: Builder, guesses: Iterable[Guess], may_go_on: Callable[[ImprovedOrder], bool]
) -> list[ImprovedOrder]:
    """Return candidates from guesses, the best first, while `may_go_on` of the fastest holds.

    Guesses whose orders get stuck give none.
    """
    candidates: list[ImprovedOrder] = []
    best: ImprovedOrder | None = None
    for guess in guesses:
        built = builder.build(guess.urgency, guess.policy)
        if built is not None:
            candidates.append(ImprovedOrder(guess, built))
            best = min(best or candidates[-1], candidates[-1], key=_seconds)
        if best is not None and not may_go_on(best):
            break
    return sorted(candidates, key=_score)


def climb(
    builder: Builder,
    candidates: Sequence[ImprovedOrder],
    random: Random,
    may_go_on: Callable[[ImprovedOrder], bool],
) -> list[ImprovedOrder]:
    """Improve the best candidates while `may_go_on` of the fastest order holds.

    Return the fastest of all, and those that were worked on at the end.
    """
    pool = sorted(candidates, key=_score)[:_SIDE_BY_SIDE]
    best = min(candidates, key=_seconds)
    while may_go_on(best):
        number = min(int(random.expovariate(0.7)), len(pool) - 1)
        guess = _change(pool[number], random, builder.queues.cycle)
        built = builder.build(guess.urgency, guess.policy)
        if built is None:
            continue
        changed = ImprovedOrder(guess, built)
        if _score(changed) <= _score(pool[number]):
            del pool[number]
            insort(pool, changed, key=_score)
            best = min(best, changed, key=_seconds)
    return [best, *pool]


def _change(candidate: ImprovedOrder, random: Random, cycle: float) -> Guess:
    """Return a guess near that of a candidate."""
    guess = candidate.guess
    if random.random() < 0.05:
        # Use the start times of the built order: the same order with other distances.
        return replace(guess, urgency=candidate.built.start)
    for _ in range(random.choice((1, 1, 1, 2))):
        if random.random() < _SHARE_OF_POLICY:
            lost = max(0.0, candidate.built.seconds - cycle * guess.urgency.shape[1])
            guess = replace(guess, policy=_change_policy(guess.policy, random, lost))
        else:
            guess = replace(guess, urgency=_change_urgency(guess.urgency, random, cycle))
    return guess


def _change_policy(policy: Policy, random: Random, lost: float) -> Policy:
    match random.randrange(4):
        case 0:
            patience = policy.patience + random.gauss(0, 0.25)
            return policy._replace(patience=min(1.5, max(0.0, patience)))
        case 1:
            overrun = policy.overrun + random.gauss(0, 0.25)
            return policy._replace(overrun=min(1.0, max(0.0, overrun)))
        case 2:
            return policy._replace(allowance=lost * random.uniform(0.0, 1.2))
        case _:
            return policy._replace(is_late=not policy.is_late)


def _change_urgency(urgency: Floats, random: Random, cycle: float) -> Floats:
    """Move one kind of work of neighbouring stages in an interval of time by some cycles."""
    changed = urgency.copy()
    stages = len(urgency) // 3
    a, b = random.randrange(stages), random.randrange(stages)
    first, last = (0, stages - 1) if random.random() < 0.2 else (min(a, b), max(a, b))
    kind = random.randrange(3) * stages
    part = changed[kind + first : kind + last + 1]
    begin, end = float(urgency.min()), float(urgency.max())
    length = (end - begin) * 2 ** -random.uniform(0, 6)
    moment = random.uniform(begin - length / 2, end)
    is_within = (part >= moment) & (part < moment + length)
    part[is_within] += random.gauss(0, 1) * cycle * random.choice((0.1, 0.3, 1.0, 2.0))
    np.maximum.accumulate(part, axis=1, out=part)
    return changed
