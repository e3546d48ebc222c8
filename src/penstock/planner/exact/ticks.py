"""Seconds in whole ticks and bytes in whole pieces, rounded so that a bound stays a bound.

Take any schedule that keeps the limits, and round its start times down to ticks. With seconds of
work and of transfers rounded down too, nothing overlaps that did not before and every input is
there in time, because floor(a) + floor(b) <= floor(a + b). So the ticks of the best schedule are
among the solutions in ticks, and the least of these is never more than its step, or one
tick more where a rank's own start counts, which is rounded down too.
"""

from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bound.each import find_ways
from penstock.planner.bound.heads import find_heads
from penstock.planner.bound.rounds import relax_to_rounds
from penstock.planner.bound.tails import find_tails
from penstock.planner.problem import SchedulingProblem

__all__ = ["TickLimits", "Ticks", "find_limits"]

# The binary digits of a step in ticks; more make no plan better and the solver slower.
_DIGITS = 26
# Sums of seconds are off by less than this part of a tick.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Ticks:
    """A unit of time: a number of seconds, a power of two."""

    seconds: float

    @classmethod
    def for_step(cls, seconds: float) -> "Ticks":
        """Return a tick that is fine enough for a step of these seconds."""
        return cls(2.0 ** (int(np.frexp(seconds)[1]) - _DIGITS))

    def down(self, seconds: float) -> int:
        """Return ticks, rounded down."""
        return floor(seconds / self.seconds)

    def least(self, seconds: float) -> int:
        """Return ticks of a sum, rounded down even if the sum is off by its last bits."""
        return floor(seconds / self.seconds - _ROUNDING)

    def most(self, seconds: float) -> int:
        """Return ticks of a sum, rounded up even if the sum is off by its last bits."""
        return ceil(seconds / self.seconds + _ROUNDING)


@dataclass(frozen=True, slots=True, eq=False)
class TickLimits:
    """Per stage and microbatch: the earliest start of F and I, and how long a step takes then."""

    forward_start: Floats
    backward_start: Floats
    after_forward: Floats
    after_backward: Floats


def find_limits(problem: SchedulingProblem) -> TickLimits:
    """Return the bounds on single actions; all 0 where the placement has no rounds.

    Where nothing waits between steps, a rank may begin late, so little follows from a late start.
    """
    shape = (problem.stages, problem.microbatches)
    if not problem.is_even:
        ways = find_ways(problem)
        heads = (ways.before_forward, ways.before_backward)
        if not problem.lasts_until_all_end:
            return TickLimits(*heads, np.zeros(shape), np.zeros(shape))
        return TickLimits(
            *heads, ways.forward + ways.after_forward, ways.backward + ways.after_backward
        )
    rounds = relax_to_rounds(problem)
    if rounds is None:
        return TickLimits(*(np.zeros(shape) for _ in range(4)))
    tails = find_tails(rounds)
    start = find_heads(rounds, tails).start
    half = rounds.visits.rounds
    if problem.boundary == "nothing":
        heads = (rounds.by_stage(start[:half]), rounds.by_stage(start[half:][::-1]))
        return TickLimits(*heads, np.zeros(shape), np.zeros(shape))
    after_backward = tails.backward + rounds.by_stage(rounds.visits.backward)[:, None]
    return TickLimits(
        rounds.by_stage(start[:half]),
        rounds.by_stage(start[half:][::-1]),
        tails.forward,
        after_backward,
    )
