"""A problem whose microbatches go round the ranks, relaxed for a bound and seen per rank."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bound.visits import Longs, Visits
from penstock.planner.problem import SchedulingProblem

__all__ = ["Rounds", "cheapest_backward", "relax_to_rounds"]

# Capacities grow by this share, so that a sum that just fits is not refused by its last bit.
_GRACE = 1e-12


@dataclass(frozen=True, eq=False)
class Rounds:
    """The costs of visits, and the lags from one to the next, per stage.

    `stage` has a row per round and a column per rank, `ranks_in_order` each round's ranks in the
    order in which microbatches come by. `turnaround` is the seconds from the last stage's F to
    its I. If `counts_from_start`, the step of a rank is its span, else its end.
    """

    visits: Visits
    stage: Longs
    ranks_in_order: Longs
    lag_down: Floats
    lag_up: Floats
    turnaround: float
    counts_from_start: bool

    @cached_property
    def descent(self) -> Floats:
        """Per round and rank, the earliest start of the first F: a stage after the other."""
        steps = self.by_stage(self.visits.forward)[:-1] + self.lag_down
        return np.concatenate(([0.0], np.cumsum(steps)))[self.stage]

    @cached_property
    def ascent(self) -> Floats:
        """Per round and rank, the seconds from the last stage's start of I to that of its own."""
        steps = (self.by_stage(self.visits.backward)[1:] + self.lag_up)[::-1]
        return np.concatenate(([0.0], np.cumsum(steps)))[::-1][self.stage]

    @property
    def first_start(self) -> Floats:
        """Per rank, when it starts: with F of its first stage, which nothing can delay."""
        start: Floats = self.descent[0]
        return start

    @property
    def counted_from(self) -> Floats:
        """Per rank, the second from which its step counts."""
        return self.first_start if self.counts_from_start else np.zeros_like(self.first_start)

    def alone(self, rank: int) -> "Rounds":
        """Return one rank by itself: all others only delay what passes through them."""
        stages = self.stage[:, rank]
        forward, backward = self.by_stage(self.visits.forward), self.by_stage(self.visits.backward)
        down = np.concatenate(([0.0], np.cumsum(forward[:-1] + self.lag_down)))
        up = np.concatenate(([0.0], np.cumsum(backward[1:] + self.lag_up)))
        last = stages[-1]
        beyond = down[-1] - down[last] + forward[-1] - forward[last]
        beyond += self.turnaround + up[-1] - up[last]
        return Rounds(
            visits=self.visits.take(np.array([rank])),
            stage=np.arange(len(stages))[:, None],
            ranks_in_order=np.zeros((len(stages), 1), dtype=np.int64),
            lag_down=np.diff(down[stages]) - forward[stages[:-1]],
            lag_up=np.diff(up[stages]) - backward[stages[1:]],
            turnaround=float(beyond),
            counts_from_start=True,
        )

    def by_stage(self, values: Floats) -> Floats:
        """Return values per round and rank in the order of the stages."""
        flat = np.empty((self.stage.size, *values.shape[2:]))
        flat[self.stage.ravel()] = values.reshape(flat.shape)
        return flat


def relax_to_rounds(problem: SchedulingProblem) -> Rounds | None:
    """Return the relaxed problem, or None where the placement does not go round the ranks.

    A rank that runs B could run I and W in its place, no later and with no more bytes, if I and W
    took no longer than B and W needed no more bytes than F took. So they are reduced to that, and
    a bound for them holds with B too.
    """
    ranks = problem.ranks
    if problem.stages % ranks:
        return None
    order = np.array(problem.placement.rank_of_stage).reshape(-1, ranks)
    if (np.sort(order, axis=1) != np.arange(ranks)).any():
        return None
    stage = np.argsort(order, axis=1) + ranks * np.arange(len(order))[:, None]
    backward, weight = cheapest_backward(problem)
    activation = problem.activation[stage]
    enough = problem.microbatches * activation.sum(axis=0)
    visits = Visits(
        microbatches=problem.microbatches,
        forward=problem.forward[stage],
        backward=backward[stage],
        weight=weight[stage],
        activation=activation,
        stash=np.minimum(problem.stash[stage], activation),
        capacity=np.minimum(problem.usable_capacity, enough) * (1 + _GRACE),
    )
    return Rounds(
        visits,
        stage,
        order,
        problem.lag_down,
        problem.lag_up,
        turnaround=0.0,
        counts_from_start=not problem.lasts_until_all_end,
    )


def cheapest_backward(problem: SchedulingProblem) -> tuple[Floats, Floats]:
    """Return, per stage, seconds of I and W that neither they nor B can beat."""
    if problem.costs.full_backward is None and not problem.costs.host_action:
        return problem.backward_input, problem.backward_weight
    full = problem.full_backward
    backward = np.minimum(problem.backward_input, full)
    return backward, np.minimum(problem.backward_weight, full - backward)
