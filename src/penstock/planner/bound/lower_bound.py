"""How fast a problem could be solved at best: a lower bound on the makespan."""

from dataclasses import replace

import numpy as np

from penstock.planner.bound.heads import find_heads
from penstock.planner.bound.one_rank import bound_ranks_alone
from penstock.planner.bound.rounds import cheapest_backward, see_from_ranks
from penstock.planner.bound.tails import find_tails
from penstock.planner.problem import SchedulingProblem

__all__ = ["lower_bound"]

# What sums of rounded numbers may be off by.
_ROUNDING = 1e-12


def lower_bound(problem: SchedulingProblem) -> float:
    """Seconds that no schedule for the problem can beat, whatever its order and its overlaps."""
    problem = _apart(problem)
    bound = max(_bound_by_work(problem), _bound_by_round_trip(problem))
    rounds = see_from_ranks(problem)
    if rounds is not None:
        tails = find_tails(rounds)
        heads = find_heads(rounds, tails)
        bound = max(bound, heads.makespan, bound_ranks_alone(rounds, heads, tails))
    return bound * (1 - _ROUNDING)


def _apart(problem: SchedulingProblem) -> SchedulingProblem:
    """A problem without overlaps that is no slower.

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
    """A rank does one thing at a time, so it takes at least as long as its work."""
    seconds = problem.forward + sum(cheapest_backward(problem))
    holder = np.array(problem.placement.rank_of_stage)
    work = np.bincount(holder, problem.microbatches * seconds, problem.ranks)
    return float(work.max())


def _bound_by_round_trip(problem: SchedulingProblem) -> float:
    """From F of a stage there is a way to go until its first I ends; then come the other I and W.

    All of that lies between the first and the last action of the stage's rank.
    """
    backward, weight = cheapest_backward(problem)
    down = np.append(problem.forward[:-1] + problem.lag_down, problem.forward[-1])
    up = np.append(backward[:-1] + problem.lag_up, backward[-1])
    way = np.cumsum((down + up)[::-1])[::-1]
    rest = (problem.microbatches - 1) * backward + problem.microbatches * weight
    return float((way + rest).max())
