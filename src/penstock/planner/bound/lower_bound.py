"""A lower bound on the seconds of a step of any schedule for a problem."""

from dataclasses import replace
from typing import Any

import numpy as np

from penstock.costs import shares_to_shorten
from penstock.ir.actions import Kind
from penstock.ir.rows import Floats
from penstock.planner.bound.each import bound_by_ways
from penstock.planner.bound.heads import find_heads
from penstock.planner.bound.one_rank import bound_ranks_alone
from penstock.planner.bound.rounds import Rounds, cheapest_backward, relax_to_rounds
from penstock.planner.bound.tails import find_tails
from penstock.planner.problem import SchedulingProblem

__all__ = ["lower_bound"]

# The relative error of sums of rounded numbers.
_ROUNDING = 1e-12

_PARTS = {
    "forward": Kind.FORWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
}

# The number of ranks that are examined by themselves: the busiest ones.
_FEW_RANKS = 8


def lower_bound(problem: SchedulingProblem) -> float:
    """Return seconds that no schedule for the problem can beat, with or without overlaps.

    They are those of the problem's boundary. Where nothing waits between steps, every rank may
    begin as late as it likes: the period is the longest span of a rank if ranks begin at the best
    of times. So only what lies between the first and the last action of one rank counts then,
    and other ranks only delay what passes through them.

    The host's seconds are part of every action. Collectives come before and after compute
    (`SchedulingProblem.around`), and what of them occupies a rank is work of that rank. Messages
    that wait for a wire only arrive later, so a bound without that holds.
    """
    return max(_bound_apart(one) for one in _take_apart(problem))


def _bound_apart(problem: SchedulingProblem) -> float:
    """Return the bound for schedules without overlaps."""
    bound = _bound_even(problem if problem.is_even else problem.of_smallest)
    if not problem.is_even:
        bound = max(bound, _bound_by_work(problem), bound_by_ways(problem))
    bound = max(bound + problem.around, float((_work(problem) + problem.blocked).max()))
    return bound * (1 - _ROUNDING)


def _bound_even(problem: SchedulingProblem) -> float:
    """Return the bound of compute and messages, for microbatches of equal size."""
    bound = max(_bound_by_work(problem), _bound_by_round_trip(problem))
    rounds = relax_to_rounds(problem)
    if rounds is not None and problem.boundary == "nothing":
        busiest = np.argsort(-rounds.visits.whole, kind="stable")[:_FEW_RANKS]
        bound = max(bound, *(_bound_by_rounds(rounds.alone(rank)) for rank in busiest.tolist()))
    elif rounds is not None:
        bound = max(bound, _bound_by_rounds(rounds))
    return bound


def _bound_by_rounds(rounds: Rounds) -> float:
    tails = find_tails(rounds)
    heads = find_heads(rounds, tails)
    return max(heads.step, bound_ranks_alone(rounds, heads, tails))


def _take_apart(problem: SchedulingProblem) -> list[SchedulingProblem]:
    """Return problems without overlaps whose best steps are not longer.

    A pair takes at most its gain times its shorter member less than the sum of both. So with its
    members shorter by shares that add up to the gain, both fit one after the other into the
    pair's time, end no later than it does, and hold no more.
    """
    costs, stages = problem.costs, problem.stages
    if not costs.overlap_gain:
        return [problem]
    whole = np.array([costs.full_backward_seconds(stage) for stage in range(stages)])
    found = []
    for shares in shares_to_shorten(costs.overlap_gain):
        seconds: dict[str, Any] = {
            name: ((1 - shares[kind]) * costs.per_stage(name, stages)).tolist()
            for name, kind in _PARTS.items()
        }
        seconds["full_backward"] = ((1 - shares[Kind.FULL_BACKWARD]) * whole).tolist()
        alone = replace(costs, **seconds, overlap_gain=0.0)
        found.append(replace(problem, costs=alone))
    return found


def _bound_by_work(problem: SchedulingProblem) -> float:
    """Return the work of the busiest rank: a rank does one thing at a time.

    Until the last rank ends there is more: a rank begins when the first microbatch has come down
    to it; and when all its F and I are done, the last gradient has its way up, and W to follow.
    """
    backward, weight = cheapest_backward(problem)
    work = _work(problem)
    if not problem.is_even:
        # Which microbatch comes first or last is not known.
        return float(work.max())
    if not problem.lasts_until_all_end:
        return float(work.max())
    first = [problem.placement.stages(rank)[0] for rank in range(problem.ranks)]
    before_last = (
        _per_rank(problem, problem.forward + backward) + _way_up(problem, backward)[first]
    )
    last_weight = float(weight[0])
    return float((_arrivals(problem)[first] + np.maximum(work, before_last + last_weight)).max())


def _bound_by_round_trip(problem: SchedulingProblem) -> float:
    """Return the longest round trip from F of a stage to its I, plus its other I and all W.

    All of that is between the first and the last action of the stage's rank. Until the last rank
    ends, the way down to the stage comes before it.
    """
    backward, weight = cheapest_backward(problem)
    down = np.append(problem.forward[:-1] + problem.lag_down, problem.forward[-1])
    up = np.append(backward[:-1] + problem.lag_up, backward[-1])
    way = np.cumsum((down + up)[::-1])[::-1]
    rest = (problem.microbatches - 1) * backward + problem.microbatches * weight
    before = _arrivals(problem) if problem.lasts_until_all_end else 0.0
    return float((before + way + rest).max())


def _work(problem: SchedulingProblem) -> Floats:
    """Return, per rank, the seconds of all its work, with the cheaper backward everywhere."""
    if problem.is_even:
        backward, weight = cheapest_backward(problem)
        return _per_rank(problem, problem.forward + backward + weight)
    split = problem.backward_input_each + problem.backward_weight_each
    each = problem.forward_each + np.minimum(split, problem.full_backward_each)
    holder = np.array(problem.placement.rank_of_stage)
    return np.bincount(holder, each.sum(axis=1), problem.ranks).astype(np.float64)


def _per_rank(problem: SchedulingProblem, seconds: Floats) -> Floats:
    """Return, per rank, these seconds of all its stages and microbatches."""
    holder = np.array(problem.placement.rank_of_stage)
    return np.bincount(holder, problem.microbatches * seconds, problem.ranks).astype(np.float64)


def _arrivals(problem: SchedulingProblem) -> Floats:
    """Return, per stage, when the first microbatch can be there at the earliest."""
    return np.concatenate(([0.0], np.cumsum(problem.forward[:-1] + problem.lag_down)))


def _way_up(problem: SchedulingProblem, backward: Floats) -> Floats:
    """Return, per stage, the seconds from the end of its I to the end of I of the first stage."""
    return np.concatenate(([0.0], np.cumsum(backward[:-1] + problem.lag_up)))
