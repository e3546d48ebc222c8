"""A problem as plain columns of numbers, for the loops that build orders.

A queue is one kind of work of one stage, microbatch after microbatch: F of stage s is queue s, I
is queue S + s, W is queue 2S + s, with S stages. Queue and microbatch give one entry of a column:

entry        0  1  2  3  4  5          two stages, one microbatch each
queue        0  1  2  3  4  5
work        F0 F1 I0 I1 W0 W1
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir.actions import Kind
from penstock.ir.rows import Floats, Rows
from penstock.ir.schedule import Schedule
from penstock.planner.order.loops import Columns
from penstock.planner.problem import SchedulingProblem
from penstock.sim.memory import byte_changes

__all__ = ["Longs", "Queues"]

Longs = NDArray[np.int64]

# A sum of bytes that just fits is not refused because of its last bit.
_GRACE = 1e-12


@dataclass(frozen=True)
class Queues:
    """The seconds and bytes of every queue, and the queues of every rank."""

    problem: SchedulingProblem

    @property
    def stages(self) -> int:
        """The number of stages; there are three times as many queues."""
        return self.problem.stages

    @property
    def microbatches(self) -> int:
        """The number of actions of every queue."""
        return self.problem.microbatches

    @property
    def num_rows(self) -> int:
        """The number of actions."""
        return 3 * self.stages * self.microbatches

    @cached_property
    def of_rank(self) -> tuple[Longs, Longs]:
        """The queues of every rank, rank after rank, as (first, queues): F, I, W of each stage."""
        holder = np.array(self.problem.placement.rank_of_stage)
        stages = np.argsort(holder, kind="stable")
        first = np.concatenate(([0], np.cumsum(3 * np.bincount(holder))))
        queues = (stages[:, None] + self.stages * np.arange(3)).ravel()
        return first.astype(np.int64), queues.astype(np.int64)

    @cached_property
    def holder(self) -> Longs:
        """Per queue, its rank."""
        return np.tile(np.array(self.problem.placement.rank_of_stage, dtype=np.int64), 3)

    @cached_property
    def seconds(self) -> Floats:
        """Per queue and microbatch, the seconds that its work occupies the rank."""
        problem = self.problem
        return np.concatenate(
            (problem.forward_each, problem.backward_input_each, problem.backward_weight_each)
        )

    @cached_property
    def change(self) -> Floats:
        """Per queue and microbatch, the bytes that its work takes; negative if it frees some."""
        by_kind = byte_changes(self.problem.costs, self.stages)
        of_queue = by_kind[[Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]].ravel()
        return np.multiply.outer(of_queue, self.problem.scales)

    @cached_property
    def capacity(self) -> Floats:
        """Per rank, the bytes that it has for these."""
        return self.problem.usable_capacity * (1 + _GRACE)

    @cached_property
    def follower(self) -> Longs:
        """Per queue, the queue of the neighbouring stage that waits for it, or -1."""
        stages = self.stages
        forward = np.arange(1, stages + 1)
        forward[-1] = 2 * stages - 1
        backward = np.concatenate(([-1], np.arange(stages, 2 * stages - 1)))
        return np.concatenate((forward, backward, np.full(stages, -1))).astype(np.int64)

    @cached_property
    def lag(self) -> Floats:
        """Per queue and microbatch, the seconds from its end to the queue that waits for it."""
        problem, none = self.problem, np.zeros(1)
        down, up = problem.lags_of_size_one
        of_queue = np.concatenate((down, none, none, up, np.zeros(self.stages)))
        return np.multiply.outer(of_queue, problem.scales)

    @cached_property
    def extra(self) -> Floats:
        """Per rank, the seconds that collectives add to its own, at least."""
        return np.maximum(self.problem.around, self.problem.blocked)

    @property
    def cycle(self) -> float:
        """The seconds that the busiest rank needs for one microbatch."""
        return float(self.problem.work.max()) / self.microbatches

    def columns(self, *, is_compiled: bool) -> Columns:
        """Return what loops need to know: arrays for compiled loops, lists for plain ones."""
        source = np.full(3 * self.stages, -1, dtype=np.int64)
        has_follower = np.flatnonzero(self.follower >= 0)
        source[self.follower[has_follower]] = has_follower
        first, queues = self.of_rank
        columns = (
            *(first, queues, self.change.ravel(), self.capacity, self.extra),
            *(self.holder, self.seconds.ravel(), self.follower, self.lag.ravel()),
            *(source, np.where(source[:, None] >= 0, self.lag[source], 0.0).ravel()),
        )
        given = (column if is_compiled else column.tolist() for column in columns)
        counts_from_start = not self.problem.lasts_until_all_end
        return Columns(self.microbatches, self.stages, counts_from_start, *given)

    def to_schedule(self, order: Longs, name: str) -> Schedule:
        """Return the schedule with this order of queues, rank after rank."""
        first, _ = self.of_rank
        # The numbers of the kinds F, I and W are those of their queues.
        kind, stage = np.divmod(order, self.stages)
        microbatch = _count_up(order)
        lengths = np.diff(first) * self.microbatches
        joined = np.zeros(len(order), dtype=np.bool_)
        rows = Rows.from_moves(lengths.tolist(), kind, stage, microbatch, joined)
        problem = self.problem
        return Schedule(rows, problem.placement, problem.dataflow, self.microbatches, name)


def _count_up(order: Longs) -> Longs:
    """Return, for every entry, the number of equal entries before it."""
    by_queue = np.argsort(order, kind="stable")
    sizes = np.bincount(order)
    begin = np.repeat(np.cumsum(sizes) - sizes, sizes)
    number = np.empty(len(order), dtype=np.int64)
    number[by_queue] = np.arange(len(order)) - begin
    return number
