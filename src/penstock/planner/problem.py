"""A scheduling problem: every stage's seconds and bytes, transfers, and the memory of every rank.

Bytes follow `sim/memory.py`: a forward takes its stage's activations when it starts; I frees all
but the stash when it ends, W the stash, B everything. So a memory limit limits the order of a
rank's actions, whatever the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.costs import Costs
from penstock.errors import MemoryLimitError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats
from penstock.sim.memory import resident_bytes
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary, require_boundary

__all__ = ["SchedulingProblem"]


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
        if microbatches < 1:
            raise SizeError(f"microbatches must be at least 1 (microbatches: {microbatches})")
        limits = np.asarray(np.inf if memory is None else memory, dtype=np.float64)
        if limits.ndim and limits.shape != (ranks,):
            raise SizeError(
                f"memory must be one limit, or one per rank (ranks: {ranks}, got {limits.size})"
            )
        caps = tuple(np.broadcast_to(limits, (ranks,)).tolist())
        problem = cls(costs, placement, microbatches, caps, boundary)
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

    def _check_memory(self) -> None:
        least = self.least_bytes
        missing = least - np.array(self.memory)
        if (missing <= 0).all():
            return
        rank = int(missing.argmax())
        raise MemoryLimitError(
            f"rank {rank} needs {least[rank]:,.0f} bytes for one microbatch at a time "
            f"({self.resident[rank]:,.0f} of them all the time), {missing[rank]:,.0f} more than "
            f"its limit of {self.memory[rank]:,.0f}; a limit of {least.max():,.0f} bytes per rank "
            "would do, or smaller microbatches, more ranks, or checkpointed stages"
        )
