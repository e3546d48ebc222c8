"""A lower bound on the makespan of any schedule for a problem."""

from dataclasses import replace

import numpy as np

from penstock.planner.bound.heads import find_heads
from penstock.planner.bound.one_rank import bound_ranks_alone
from penstock.planner.bound.rounds import cheapest_backward, relax_to_rounds
from penstock.planner.bound.tails import find_tails
from penstock.planner.problem import SchedulingProblem

__all__ = ["lower_bound"]

# The relative error of sums of rounded numbers.
_ROUNDING = 1e-12


def lower_bound(problem: SchedulingProblem) -> float:
    """Return seconds that no schedule for the problem can beat, with or without overlaps."""
    problem = _apart(problem)
    bound = max(_bound_by_work(problem), _bound_by_round_trip(problem))
    rounds = relax_to_rounds(problem)
    if rounds is not None:
        tails = find_tails(rounds)
        heads = find_heads(rounds, tails)
        bound = max(bound, heads.makespan, bound_ranks_alone(rounds, heads, tails))
    return bound * (1 - _ROUNDING)


def _apart(problem: SchedulingProblem) -> SchedulingProblem:
    """Return a problem without overlaps whose best makespan is not larger.

    A pair takes at most `gain` times its F less than the sum of both. So with every F shorter by
    that, F and then the other fit one after the other into the pair's time, end no later than it
    does, and hold no more.
    """
    costs = problem.costs
    if not costs.overlap_gain:
        return problem
    forward = (1 - costs.overlap_gain) * costs.per_stage("forward", problem.stages)
    return replace(problem, costs=replace(costs, forward=forward.tolist(), overlap_gain=0.0))


def _bound_by_work(problem: SchedulingProblem) -> float:
    """Return the work of the busiest rank: a rank does one thing at a time."""
    seconds = problem.forward + sum(cheapest_backward(problem))
    holder = np.array(problem.placement.rank_of_stage)
    work = np.bincount(holder, problem.microbatches * seconds, problem.ranks)
    return float(work.max())


def _bound_by_round_trip(problem: SchedulingProblem) -> float:
    """Return the longest round trip from F of a stage to its I, plus its other I and all W.

    All of that is between the first and the last action of the stage's rank.
    """
    backward, weight = cheapest_backward(problem)
    down = np.append(problem.forward[:-1] + problem.lag_down, problem.forward[-1])
    up = np.append(backward[:-1] + problem.lag_up, backward[-1])
    way = np.cumsum((down + up)[::-1])[::-1]
    rest = (problem.microbatches - 1) * backward + problem.microbatches * weight
    return float((way + rest).max())
