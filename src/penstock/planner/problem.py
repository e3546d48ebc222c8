"""What there is to schedule: every stage's work and bytes, who waits how long, who has what room.

Bytes follow `sim/memory.py`: a forward takes its stage's activations when it starts; I gives back
all but the stash when it ends, W the stash, B everything. So a limit of bytes limits the order of
a rank's actions, whatever the times.
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

__all__ = ["SchedulingProblem"]


@dataclass(frozen=True)
class SchedulingProblem:
    """Stages in a chain on their ranks, what they cost, and the bytes that each rank has.

    `costs` are per stage of this placement. `memory` is bytes per rank, infinite where there is
    no limit.
    """

    costs: Costs
    placement: Placement
    microbatches: int
    memory: tuple[float, ...]

    @classmethod
    def of(
        cls,
        costs: Costs,
        placement: Placement,
        microbatches: int,
        memory: float | Sequence[float] | None = None,
    ) -> "SchedulingProblem":
        """A problem from what a user gives, after checking that some schedule keeps the limit."""
        ranks = placement.num_ranks
        if microbatches < 1:
            raise SizeError(f"microbatches must be at least 1 (microbatches: {microbatches})")
        limits = np.asarray(np.inf if memory is None else memory, dtype=np.float64)
        if limits.ndim and limits.shape != (ranks,):
            raise SizeError(
                f"one memory limit, or one per rank (ranks: {ranks}, got {limits.size})"
            )
        caps = tuple(np.broadcast_to(limits, (ranks,)).tolist())
        problem = cls(costs, placement, microbatches, caps)
        problem._check_memory()
        return problem

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.placement.num_ranks

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.placement.num_stages

    @cached_property
    def dataflow(self) -> Dataflow:
        """Every stage feeds the next one."""
        return Dataflow.chain(self.stages)

    @cached_property
    def forward(self) -> Floats:
        """Per stage, the seconds that F keeps its rank, its send included."""
        return self.costs.per_stage("forward", self.stages) + self._send_seconds(ahead=1)

    @cached_property
    def backward_input(self) -> Floats:
        """Per stage, the seconds that I keeps its rank, its send included."""
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
        """Per stage but the last, the seconds that its output needs to the next stage."""
        return self._lags(self.placement.rank_of_stage[:-1], self.placement.rank_of_stage[1:])

    @cached_property
    def lag_up(self) -> Floats:
        """Per stage but the last, the seconds that the next stage's gradient needs to it."""
        return self._lags(self.placement.rank_of_stage[1:], self.placement.rank_of_stage[:-1])

    def _lags(self, senders: Sequence[int], receivers: Sequence[int]) -> Floats:
        table = self.costs.per_link(self.ranks)
        sender, receiver = np.array(senders, dtype=int), np.array(receivers, dtype=int)
        return np.where(sender == receiver, 0.0, table[sender, receiver])

    def _send_seconds(self, ahead: int) -> Floats:
        """Per stage, the seconds of sending to the neighbour `ahead`, if that is elsewhere."""
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
        """Per rank, the bytes that are left for activations and stashes."""
        return np.array(self.memory) - self.resident

    @cached_property
    def work(self) -> Floats:
        """Per rank, the seconds of all its F, I and W."""
        seconds = self.forward + self.backward_input + self.backward_weight
        holder = np.array(self.placement.rank_of_stage)
        return np.bincount(holder, self.microbatches * seconds, self.ranks).astype(np.float64)

    @cached_property
    def least_bytes(self) -> Floats:
        """Per rank, the bytes without which there is no schedule: one microbatch at a time."""
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
