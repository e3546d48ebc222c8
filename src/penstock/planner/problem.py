"""A scheduling problem: every stage's seconds and bytes, transfers, and the memory of every rank.

Bytes follow `sim/memory.py`: a forward takes its stage's activations when it starts; I frees all
but the stash when it ends, W the stash, B everything. So a memory limit limits the order of a
rank's actions, whatever the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from penstock.costs import Costs
from penstock.errors import ArgumentError, MemoryLimitError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats
from penstock.schedules.sizes import require_whole_number
from penstock.sim.given_costs import costs_or_unit
from penstock.sim.memory import resident_bytes
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary, require_boundary
from penstock.untrusted import quote, to_quantity

__all__ = ["SchedulingProblem", "count_bytes", "read_limits"]

# A sum of bytes that just fits is not refused because of its last bit.
_GRACE = 1e-12


@dataclass(frozen=True)
class SchedulingProblem:
    """A chain of stages on ranks, with costs and the memory of each rank.

    `costs` become those per stage of this placement, whatever they were given for: single numbers
    are one rank's share of the model. `memory` is bytes per rank, infinite without a limit.
    `boundary` is what happens between two steps; it says which seconds are to be few.
    """

    costs: Costs
    placement: Placement
    microbatches: int
    memory: tuple[float, ...]
    boundary: Boundary = DEFAULT_BOUNDARY

    def __post_init__(self) -> None:
        costs = self.costs.divide_shares(self.ranks, range(self.stages))
        object.__setattr__(self, "costs", costs)

    @classmethod
    def of(
        cls,
        costs: Costs,
        placement: Placement,
        microbatches: int,
        memory: float | Sequence[float] | None = None,
        *,
        boundary: Boundary = DEFAULT_BOUNDARY,
    ) -> "SchedulingProblem":
        """Check the arguments, and that some schedule keeps the limit; return the problem."""
        ranks = placement.num_ranks
        require_boundary(boundary)
        require_whole_number("microbatches", microbatches)
        if microbatches < 1:
            raise SizeError(f"microbatches must be at least 1 (microbatches: {microbatches})")
        caps = read_limits(memory, ranks)
        problem = cls(costs_or_unit(costs), placement, microbatches, caps, boundary)
        problem._check_memory()
        return problem

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.num_ranks

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    @property
    def lasts_until_all_end(self) -> bool:
        """Whether a step lasts until the last rank ends; else each rank has its own span."""
        return self.boundary in ("everything", "gradients")

    @cached_property
    def dataflow(self) -> Dataflow:
        """Every stage feeds the next one."""
        return Dataflow.chain(self.stages)

    @cached_property
    def forward(self) -> Floats:
        """Per stage, the seconds that F occupies its rank, its send included."""
        return self.costs.per_stage("forward", self.stages) + self._send_seconds(ahead=1)

    @cached_property
    def backward_input(self) -> Floats:
        """Per stage, the seconds that I occupies its rank, its send included."""
        return self.costs.per_stage("backward_input", self.stages) + self._send_seconds(ahead=-1)

    @cached_property
    def backward_weight(self) -> Floats:
        """Per stage, the seconds of W."""
        return self.costs.per_stage("backward_weight", self.stages)

    @cached_property
    def activation(self) -> Floats:
        """Per stage, the bytes that F takes."""
        return self.costs.per_stage("activation_bytes", self.stages)

    @cached_property
    def stash(self) -> Floats:
        """Per stage, the bytes that are left after I."""
        return self.costs.per_stage("weight_stash_bytes", self.stages)

    @cached_property
    def lag_down(self) -> Floats:
        """Per stage but the last, the transfer seconds of its output to the next stage."""
        return self._lags(self.placement.rank_of_stage[:-1], self.placement.rank_of_stage[1:])

    @cached_property
    def lag_up(self) -> Floats:
        """Per stage but the last, the transfer seconds of the next stage's gradient to it."""
        return self._lags(self.placement.rank_of_stage[1:], self.placement.rank_of_stage[:-1])

    def _lags(self, senders: Sequence[int], receivers: Sequence[int]) -> Floats:
        table = self.costs.per_link(self.ranks)
        sender, receiver = np.array(senders, dtype=int), np.array(receivers, dtype=int)
        return np.where(sender == receiver, 0.0, table[sender, receiver])

    def _send_seconds(self, ahead: int) -> Floats:
        """Return, per stage, the seconds of a send to its neighbour on another rank."""
        holder = np.array(self.placement.rank_of_stage)
        is_remote = holder != np.roll(holder, -ahead)
        is_remote[-1 if ahead == 1 else 0] = False
        return np.where(is_remote, self.costs.send, 0.0)

    @cached_property
    def resident(self) -> Floats:
        """Per rank, the bytes that it holds all the time."""
        return resident_bytes(self.costs, self.placement, self.dataflow)

    @cached_property
    def room(self) -> Floats:
        """Per rank, the bytes left for activations and stashes."""
        return np.array(self.memory) - self.resident

    @cached_property
    def work(self) -> Floats:
        """Per rank, the seconds of all its F, I and W."""
        seconds = self.forward + self.backward_input + self.backward_weight
        holder = np.array(self.placement.rank_of_stage)
        return np.bincount(holder, self.microbatches * seconds, self.ranks).astype(np.float64)

    @cached_property
    def least_bytes(self) -> Floats:
        """Per rank, the least bytes of any schedule: one microbatch at a time."""
        one = np.maximum(self.activation, self.stash)
        return self.resident + np.bincount(self.placement.rank_of_stage, one, self.ranks)

    @cached_property
    def missing_bytes(self) -> Floats:
        """Per rank, the bytes by which it misses its limit; none are missing up to 0.

        What just fits, but for the last bit of a sum, fits.
        """
        missing = self.least_bytes - np.array(self.memory)
        fits = self.least_bytes - self.resident <= self.room * (1 + _GRACE)
        short: Floats = np.where(fits, np.minimum(missing, 0.0), missing)
        return short

    def _check_memory(self) -> None:
        least, missing = self.least_bytes, self.missing_bytes
        if (missing <= 0).all():
            return
        rank = int(missing.argmax())
        raise MemoryLimitError(
            f"rank {rank} needs {count_bytes(least[rank])} bytes for one microbatch at a time "
            f"({count_bytes(self.resident[rank])} of them all the time), "
            f"{count_bytes(missing[rank])} more than its limit of "
            f"{count_bytes(self.memory[rank])}; a limit of {count_bytes(least.max())} bytes per "
            "rank would do, or smaller microbatches, more ranks, or checkpointed stages"
        )


def read_limits(memory: float | Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """Return the bytes of every rank from what a user gives: none, one number or one per rank."""
    if memory is None:
        return (inf,) * ranks
    values: object = memory
    is_list = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    given: list[Any] = list(memory) if is_list else [memory]  # type: ignore[arg-type]  # a list
    limits = [inf if limit == inf else to_quantity(limit) for limit in given]
    for limit, value in zip(limits, given, strict=True):
        if limit is None:
            raise ArgumentError(
                "memory must be a number of bytes from 0, or one per rank "
                f"(got {quote(value)}); write 80e9 for 80 GB"
            )
    if is_list and len(limits) != ranks:
        raise SizeError(
            f"memory must be one limit, or one per rank (ranks: {ranks}, got {len(limits)})"
        )
    return tuple(limits if is_list else limits * ranks)  # type: ignore[arg-type]  # checked above


def count_bytes(value: float) -> str:
    """Return a number of bytes for a message; small ones with their fraction.

    >>> count_bytes(80e9), count_bytes(0.30000001), count_bytes(12)
    ('80,000,000,000', '0.3', '12')
    """
    is_whole = value == round(value) if value < inf else True
    return f"{value:,.0f}" if is_whole or value >= 1000 else f"{value:.4g}"
