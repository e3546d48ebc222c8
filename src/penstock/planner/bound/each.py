"""Bounds for microbatches of different size, which no order of them beats.

The other bounds give the j-th start of a stage and kind to microbatch j, which changes nothing
where all are equal. Here they are not, and one may overtake another. Two arguments remain:

- Shorten every microbatch to the smallest. Each action then takes no longer and holds no more, so
  every order is still allowed and ends no later: what no order of these beats, none beats.
- Whatever the order, each microbatch goes its own way down and up the stages, and a rank does one
  thing at a time. An action is not before its way to it (its head), and after it comes the rest of
  its way (its tail). On one rank alone, Jackson's rule gives the least time for heads and tails.
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bound.one_rank import TimedAction, run_jobs
from penstock.planner.problem import SchedulingProblem

__all__ = ["EachWays", "bound_by_ways", "find_ways"]

# Each action costs microseconds; of many ranks only the busiest are examined.
_MANY_ACTIONS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class EachWays:
    """Per stage and microbatch: seconds of F, I and W, and the way to F and I and after them.

    `before_forward` ends when F can start, and `after_forward` begins when it ends; likewise for
    I. W of the microbatch comes after its I.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    before_forward: Floats
    before_backward: Floats
    after_forward: Floats
    after_backward: Floats


def find_ways(problem: SchedulingProblem) -> EachWays:
    """Follow every microbatch by itself down the stages and back, at the least seconds."""
    forward = problem.forward_each
    full = problem.full_backward_each
    backward = np.minimum(problem.backward_input_each, full)
    weight = np.minimum(problem.backward_weight_each, full - backward)
    down, up = (np.multiply.outer(lag, problem.scales) for lag in problem.lags_of_size_one)
    nothing = np.zeros((1, problem.microbatches))
    arrival = np.concatenate((nothing, np.cumsum(forward[:-1] + down, axis=0)))
    turn = arrival[-1] + forward[-1]
    climb = np.cumsum((backward[1:] + up)[::-1], axis=0)[::-1]
    return_way = turn + np.concatenate((climb, nothing))
    left = np.empty_like(weight)
    left[0] = weight[0]
    for stage in range(1, problem.stages):
        onward = up[stage - 1] + backward[stage - 1] + left[stage - 1]
        left[stage] = np.maximum(weight[stage], onward)
    after = return_way + backward + left - arrival - forward
    return EachWays(forward, backward, weight, arrival, return_way, after, left)


def bound_by_ways(problem: SchedulingProblem) -> float:
    """Return what the busiest ranks need alone, given the way of every microbatch."""
    ways = find_ways(problem)
    busiest = np.argsort(-problem.work, kind="stable")
    per_rank = 3 * problem.stages * problem.microbatches // problem.ranks
    chosen = busiest[: max(1, _MANY_ACTIONS // max(1, per_rank))]
    return max(_run_rank(problem, ways, rank) for rank in chosen.tolist())


def _run_rank(problem: SchedulingProblem, ways: EachWays, rank: int) -> float:
    """Return the least time of a rank; of its own span, where that is what counts.

    A span begins with the rank's first action. What the rank does for a microbatch comes no
    earlier after that than after the microbatch's own F of the rank's first stage, and nothing
    that happens on other ranks afterwards counts.
    """
    stages = list(problem.placement.stages(rank))
    is_whole = problem.lasts_until_all_end
    begin = np.zeros(problem.microbatches) if is_whole else ways.before_forward[stages[0]]
    jobs: list[TimedAction] = []
    for stage in stages:
        back = ways.before_backward[stage] - begin
        last = ways.before_backward[stages[0]] + ways.backward[stages[0]]
        rest = last - ways.before_backward[stage] - ways.backward[stage]
        after = ways.after_backward[stage] if is_whole else np.maximum(rest, 0.0)
        onward = ways.after_forward[stage]
        if not is_whole:
            onward = last - ways.before_forward[stage] - ways.forward[stage]
        columns = (
            (ways.before_forward[stage] - begin, ways.forward[stage], onward),
            (back, ways.backward[stage], after),
            (back + ways.backward[stage], ways.weight[stage], 0 * after),
        )
        for heads, seconds, tails in columns:
            triples = zip(heads.tolist(), seconds.tolist(), tails.tolist(), strict=True)
            jobs += [TimedAction(*triple) for triple in triples]
    return run_jobs(sorted(jobs))
