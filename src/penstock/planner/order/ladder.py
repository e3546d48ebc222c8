"""The ladder of memory limits at which orders are searched besides the limit itself.

A rung has room for some microbatches on the rank that is tightest. Rungs come in levels, the
coarse ones first, and every level halves the distance (here for p ranks and m microbatches):

level 0                         p                   2p
level 1    1          p/2               3p/2                            m
level 2         p/4       3p/4     5p/4      7p/4

What is guaranteed: at a limit, the work of all rungs up to it is done, in a fixed order. What
happens on a rung depends on that rung, on those below and on the effort, but not on the limit. So
whatever the ladder finds at a tighter limit, it finds at a looser one too, and a plan is never
worse than the ladder's answer for any tighter limit in the same proportion, rank by rank, such as
one number for all ranks.

What is not: the search at the limit itself comes on top, and may find more at a tighter limit than
at a looser one. To exclude that, orders would have to be searched on rungs only. Measured on
random problems, that costs one percent of a step on average: more than it protects from.
"""

from dataclasses import dataclass

import numpy as np

from penstock.planner.problem import SchedulingProblem

__all__ = ["Rung", "find_rungs"]

# The finest distance between rungs, in microbatches, and from which multiple of the ranks on it
# is four times as large.
_FINEST = 0.25
_FINE_UP_TO = 2

# A rung that exceeds the limit by this share is still below it.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rung:
    """A limit of the ladder: room for these microbatches, found on this level."""

    microbatches: float
    level: int
    memory: tuple[float, ...]
    is_within: bool


def find_rungs(problem: SchedulingProblem) -> list[Rung]:
    """Return the rungs of a problem, the lowest first, and whether each is within the limit.

    Where no microbatch holds anything, there is one rung.

    >>> from penstock.costs import Costs
    >>> from penstock.ir.placement import Placement
    >>> problem = SchedulingProblem.of(Costs(activation_bytes=1), Placement.loop(2), 4, memory=3)
    >>> [(rung.microbatches, rung.level) for rung in find_rungs(problem) if rung.level < 2]
    [(1.0, 1), (2.0, 0), (3.0, 1), (4.0, 0)]
    """
    limit = np.array(problem.memory)
    is_limited = np.isfinite(limit)
    # Proportions: the same for every limit that is one number for all ranks, to the last bit.
    limit = limit / limit[is_limited].max() if is_limited.any() else np.ones(problem.ranks)
    one = np.bincount(
        problem.placement.rank_of_stage,
        np.maximum(problem.activation, problem.stash),
        problem.ranks,
    )
    rungs: list[Rung] = []
    for held, level in sorted(_levels(problem.ranks, problem.microbatches).items()):
        needed = problem.resident + held * one
        scale = float(np.max(np.divide(needed, limit, out=np.zeros_like(needed), where=limit > 0)))
        memory = tuple((scale * limit).tolist()) if scale else problem.memory
        pairs = zip(memory, problem.memory, strict=True)
        is_within = all(rung <= most * (1 + _ROUNDING) for rung, most in pairs)
        if not rungs or memory != rungs[-1].memory:
            rungs.append(Rung(held, level, memory, is_within))
    return rungs


def _levels(ranks: int, microbatches: int) -> dict[float, int]:
    """Return the level of every number of microbatches that a rung has room for."""
    most = float(microbatches)
    levels = {min(float(ranks), most): 0, min(2.0 * ranks, most): 0}
    levels = {1.0: 1, most: 1} | levels
    level, step = 1, ranks / 2
    while step >= _FINEST:
        fine = np.arange(step, _FINE_UP_TO * ranks, step)
        coarse = np.arange(_FINE_UP_TO * ranks, microbatches, 4 * step)
        for held in (*fine.tolist(), *coarse.tolist()):
            levels.setdefault(held, level)
        level, step = level + 1, step / 2
    return {held: level for held, level in levels.items() if 1 <= held <= microbatches}
