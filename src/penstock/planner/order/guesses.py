"""First guesses at how urgent each piece of work is.

A microbatch goes down the stages and comes back; the next one follows a cycle later. So F, I and W
of stage s and microbatch k are as urgent as the second at which they would run on that trip:

stage 0   F                   I W             a trip may be slow (longer steps, waits where it
stage 1      F             I W                turns back), and F may start some cycles early:
stage 2         F       I W                   as many as microbatches are to be in flight
stage 3            F I W

The longer the trip, the more microbatches are in flight at once, and the more bytes they hold. The
order of a known schedule is a guess too.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np

from penstock.costs import Costs
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.passes.backward import split_backward
from penstock.planner.order.builder import Policy
from penstock.planner.order.queues import Queues
from penstock.sim.engine import simulate

__all__ = ["Guess", "Guesser", "lengthen", "urgency_of"]


# How often the needed bytes fit into the capacity where none are needed.
_PLENTY = 1e9


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """The urgency of every queue's microbatches, small first, and a policy for waiting."""

    urgency: Floats
    policy: Policy


@dataclass(frozen=True)
class Guesser:
    """Makes guesses for one problem, each from the next random numbers.

    `bound` is seconds that no schedule can beat; it says how much time the busiest rank must lose.
    """

    queues: Queues
    random: Random
    bound: float

    def guess(self) -> Guess:
        """Return the next guess."""
        is_slow = self.random.random() < 0.3
        offsets, cycle = self._slow_trip() if is_slow else self._early_forwards()
        follow = cycle * np.arange(self.queues.microbatches)
        return Guess(np.add.outer(offsets, follow), self.policy())

    def one_at_a_time(self) -> Guess:
        """Return the guess with one microbatch at a time, which fits wherever anything does."""
        forward, backward = self.straight
        offsets = np.concatenate(
            (forward, backward, backward + self.queues.problem.backward_input)
        )
        cycle = float(offsets.max()) + self.queues.cycle
        follow = cycle * np.arange(self.queues.microbatches)
        return Guess(np.add.outer(offsets, follow), Policy(0.0, 1.0, 0.0, True))

    def policy(self) -> Policy:
        """Return a random policy."""
        choose, queues = self.random.choice, self.queues
        least = max(0.0, self.bound - queues.cycle * queues.microbatches)
        cycles = queues.cycle * choose((0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 1000.0))
        return Policy(
            patience=choose((0.0, 0.25, 0.5, 1.0, 1.25)),
            overrun=choose((0.0, 0.25, 0.5, 0.75, 1.0)),
            allowance=choose((cycles, least * choose((1.0, 1.05, 1.2, 1.5)))),
            is_late=self.random.random() < 0.7,
        )

    def _slow_trip(self) -> tuple[Floats, float]:
        """Return offsets with steps longer than the work, and waits where the trip turns."""
        choose = self.random.choice
        down, up = (choose((1.0, 1.0, 1.25, 1.5, 2.0)) for _ in range(2))
        waits = [choose((0.0, 0.0, 0.2, 0.5, 1.0)) for _ in range(3)]
        forward, backward = self._trip(down, up, waits)
        weight = backward + self._weight_delay()
        cycle = self.queues.cycle * choose(
            (1.0, 1.0, 1.05, 1.1, 1.3, 1.6, 2.0, 2.0 * len(forward))
        )
        return np.concatenate((forward, backward, weight)), cycle

    def _early_forwards(self) -> tuple[Floats, float]:
        """Return offsets with F as many cycles before I as microbatches are to be in flight."""
        forward, backward = self.straight
        problem, cycle, choose = self.queues.problem, self.queues.cycle, self.random.choice
        life = backward + problem.backward_input - forward
        holder = np.array(problem.placement.rank_of_stage)
        needed = np.bincount(holder, life * problem.activation, problem.ranks)
        whole = problem.microbatches * np.bincount(holder, problem.activation, problem.ranks)
        capacity = np.minimum(problem.usable_capacity, whole)
        fill = np.divide(capacity, needed, out=np.full(problem.ranks, _PLENTY), where=needed > 0)
        fullest = fill.min() if self.random.random() < 0.5 else fill[holder]
        in_flight = life * choose((0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.0)) * fullest
        in_flight = np.minimum(in_flight, problem.microbatches)
        in_flight = in_flight + choose((0.0, 0.25, 0.5, -0.25, -0.5))
        in_flight = np.maximum(in_flight, choose((0.5, 1.0)))
        if self.random.random() < 0.5:
            in_flight = np.floor(in_flight)
        early = backward + cycle * (choose((0.0, 0.1, 0.5)) - in_flight)
        weight = backward + self._weight_delay()
        return np.concatenate((early, backward, weight)), cycle

    def _weight_delay(self) -> Floats:
        last = 1000.0 * self.queues.microbatches
        cycles = self.random.choice((0.0, 0.5, 1.0, 2.0, 4.0, 8.0, last, last))
        return self.queues.problem.backward_input + cycles * self.queues.cycle

    @cached_property
    def straight(self) -> tuple[Floats, Floats]:
        """Per stage, when a microbatch gets there going forward and coming back, unhindered."""
        return self._trip(1.0, 1.0, [0.0, 0.0, 0.0])

    def _trip(self, down: float, up: float, waits: list[float]) -> tuple[Floats, Floats]:
        """Return, per stage, when a microbatch gets there going forward, and coming back."""
        problem, cycle = self.queues.problem, self.queues.cycle
        holder = np.array(problem.placement.rank_of_stage)
        step = np.sign(np.diff(holder, append=holder[-1]))
        ahead = np.where(step > 0, down, up) * problem.forward
        ahead[:-1] += problem.lag_down + np.where(step[:-1] == 0, waits[0] * cycle, 0.0)
        forward = np.concatenate(([0.0], np.cumsum(ahead)))
        back = np.where(np.concatenate(([0], -step[:-1])) > 0, down, up) * problem.backward_input
        back[1:] += problem.lag_up + np.where(step[:-1] == 0, waits[2] * cycle, 0.0)
        backward = np.concatenate((np.cumsum(back[::-1])[::-1][1:], [0.0]))
        return forward[:-1], forward[-1] + waits[1] * cycle + backward


def urgency_of(schedule: Schedule, costs: Costs) -> Floats:
    """Return the start times of a known schedule as urgencies, with overlaps taken apart."""
    rows = schedule.rows
    alone = replace(schedule, rows=replace(rows, joined=np.zeros(len(rows), dtype=np.bool_)))
    split = split_backward(alone)
    urgency = np.zeros((3 * schedule.num_stages, schedule.microbatches))
    # The numbers of the kinds F, I and W are those of their queues.
    queue = split.rows.kind.astype(np.int64) * schedule.num_stages + split.rows.stage
    urgency[queue, split.rows.microbatch] = simulate(split, costs.without_collectives()).start
    return np.maximum.accumulate(urgency, axis=1)


def lengthen(guess: Guess, microbatches: int) -> Guess:
    """Return the guess for more microbatches: the missing ones go in its middle, at its pace."""
    few = guess.urgency.shape[1]
    middle, more = few // 2, microbatches - few
    around = guess.urgency[:, [few // 4, few - 1 - few // 4]]
    pace = float(np.median(np.diff(around))) / (few - 1 - 2 * (few // 4))
    between = guess.urgency[:, middle - 1 : middle] + pace * np.arange(1, more + 1)
    parts = (guess.urgency[:, :middle], between, guess.urgency[:, middle:] + pace * more)
    urgency = np.maximum.accumulate(np.concatenate(parts, axis=1), axis=1)
    return replace(guess, urgency=urgency)
