"""A scheduling problem: every stage's seconds and bytes, transfers, and the memory of every rank.

Bytes follow `sim/memory.py`: a forward takes its stage's activations when it starts; I frees all
but the stash when it ends, W the stash, B everything. So a memory limit limits the order of a
rank's actions, whatever the times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from penstock.costs import COLLECTIVES, Costs
from penstock.costs.given import costs_or_unit
from penstock.errors import MemoryLimitError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Bools, Floats
from penstock.planner.limits import count_bytes, read_limits, usable_capacity
from penstock.schedules.sizes import require_whole_number
from penstock.sim.memory import resident_bytes
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary, require_boundary

__all__ = ["SchedulingProblem"]

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
        costs.per_wire(self.ranks)
        scales = costs.scales(self.microbatches)
        if not costs.is_unscaled and (scales == scales[0]).all():
            costs = costs.for_even_microbatches(float(scales[0]))
        object.__setattr__(self, "costs", costs)

    def __repr__(self) -> str:
        sizes = f"{self.ranks} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return f"<SchedulingProblem: {sizes}>"

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
    def scales(self) -> Floats:
        """The size of every microbatch, as a multiple of what the costs are for."""
        return self.costs.scales(self.microbatches)

    @cached_property
    def is_even(self) -> bool:
        """Whether all microbatches have the same size."""
        return bool((self.scales == self.scales[0]).all())

    @cached_property
    def of_smallest(self) -> "SchedulingProblem":
        """The problem in which every microbatch is as small as the smallest one."""
        costs = self.costs.for_even_microbatches(float(self.scales.min()))
        return replace(self, costs=costs)

    @property
    def without_limit(self) -> "SchedulingProblem":
        """The problem with as many bytes per rank as anything takes."""
        return replace(self, memory=(inf,) * self.ranks)

    def with_microbatches(self, microbatches: int) -> "SchedulingProblem":
        """Return the problem with another number of microbatches, each of the mean size."""
        costs = self.costs
        if not costs.is_unscaled:
            costs = costs.for_even_microbatches(float(self.scales.mean()))
        return replace(self, costs=costs, microbatches=microbatches)

    @cached_property
    def forward_each(self) -> Floats:
        """Per stage and microbatch, the seconds that F occupies its rank, messages included."""
        return self._each("forward", sends=1)

    @cached_property
    def backward_input_each(self) -> Floats:
        """Per stage and microbatch, the seconds that I occupies its rank, messages included."""
        return self._each("backward_input", sends=-1)

    @cached_property
    def backward_weight_each(self) -> Floats:
        """Per stage and microbatch, the seconds of W."""
        return self._each("backward_weight")

    @cached_property
    def full_backward_each(self) -> Floats:
        """Per stage and microbatch, the seconds that B occupies its rank, messages included."""
        return self._each("full_backward", sends=-1)

    @cached_property
    def forward(self) -> Floats:
        """Per stage, the mean seconds that F occupies its rank, messages included."""
        return _mean(self.forward_each)

    @cached_property
    def backward_input(self) -> Floats:
        """Per stage, the mean seconds that I occupies its rank, messages included."""
        return _mean(self.backward_input_each)

    @cached_property
    def backward_weight(self) -> Floats:
        """Per stage, the mean seconds of W."""
        return _mean(self.backward_weight_each)

    @cached_property
    def full_backward(self) -> Floats:
        """Per stage, the mean seconds that B occupies its rank, messages included."""
        return _mean(self.full_backward_each)

    @cached_property
    def activation(self) -> Floats:
        """Per stage, the mean bytes that F takes."""
        return self.costs.per_stage("activation_bytes", self.stages) * self._mean_scale

    @cached_property
    def stash(self) -> Floats:
        """Per stage, the mean bytes that are left after I."""
        return self.costs.per_stage("weight_stash_bytes", self.stages) * self._mean_scale

    @cached_property
    def lag_down(self) -> Floats:
        """Per stage but the last, the mean transfer seconds of its output to the next stage."""
        return self.lags_of_size_one[0] * self._mean_scale

    @cached_property
    def lag_up(self) -> Floats:
        """Per stage but the last, those of the next stage's gradient to it."""
        return self.lags_of_size_one[1] * self._mean_scale

    @cached_property
    def lags_of_size_one(self) -> tuple[Floats, Floats]:
        """The transfer seconds down and up, per stage but the last, of a microbatch of size 1."""
        holder = self.placement.rank_of_stage
        return self._lags(holder[:-1], holder[1:]), self._lags(holder[1:], holder[:-1])

    @property
    def _mean_scale(self) -> float:
        return 1.0 if self.costs.is_unscaled else float(self.scales.mean())

    def _each(self, name: str, sends: int = 0) -> Floats:
        """Return seconds per stage and microbatch: what grows with its size, and what does not.

        `sends` is 1 if the result goes to the next stage, and -1 if it goes to the one before.
        """
        costs, stages = self.costs, self.stages
        if name == "full_backward":
            own = np.array([costs.full_backward_seconds(stage) for stage in range(stages)])
        else:
            own = costs.per_stage(name, stages)
        fixed = costs.host_action * (own > 0)
        if sends:
            leaves, arrives = self._is_remote(sends), self._is_remote(-sends)
            own = own + np.where(leaves, costs.send, 0.0)
            fixed = fixed + costs.host_message * (leaves.astype(np.float64) + arrives)
        each: Floats = np.multiply.outer(own, self.scales) + fixed[:, None]
        return each

    def _lags(self, senders: Sequence[int], receivers: Sequence[int]) -> Floats:
        table = self.costs.per_link(self.ranks)
        sender, receiver = np.array(senders, dtype=int), np.array(receivers, dtype=int)
        return np.where(sender == receiver, 0.0, table[sender, receiver])

    def _is_remote(self, ahead: int) -> Bools:
        """Return, per stage, whether its neighbour (1: the next one) is on another rank."""
        holder = np.array(self.placement.rank_of_stage)
        is_remote: Bools = holder != np.roll(holder, -ahead)
        is_remote[-1 if ahead == 1 else 0] = False
        return is_remote

    @cached_property
    def blocked(self) -> Floats:
        """Per rank, the seconds of its step in which collectives occupy it, at least.

        Papers count from the first F of a rank, which UNSHARD comes before.
        """
        names = [name for name in COLLECTIVES if (name, self.boundary) != ("unshard", "papers")]
        seconds = sum(self.costs.per_stage(name, self.stages) for name in names)
        total = np.bincount(self.placement.rank_of_stage, seconds, self.ranks)
        return (1 - self.costs.collective_overlap) * total.astype(np.float64)

    @cached_property
    def around(self) -> float:
        """The seconds that collectives add to compute, at least, before it and after it.

        Everything comes after the first F of the first stage, which waits for its UNSHARD; where
        ranks have their own spans, after the rank's own first F. The last compute of a rank is
        the last backward of a stage, whose REDUCE_GRAD and RESHARD follow: the part of each that
        occupies the rank, one after the other, and the part of each beside it, one after the
        other, where the second part of one may meet the first part of the other.
        """
        gather, free, reduce = (self.costs.per_stage(name, self.stages) for name in COLLECTIVES)
        beside = self.costs.collective_overlap
        longer, shorter = max(beside, 1 - beside), min(beside, 1 - beside)
        after = float((longer * (free + reduce) + shorter * np.minimum(free, reduce)).min())
        match self.boundary:
            case "papers":
                return after
            case "nothing":
                return float(gather.min()) + after
            case _:
                return float(gather[0]) + after

    @cached_property
    def resident(self) -> Floats:
        """Per rank, the bytes that it holds all the time."""
        return resident_bytes(self.costs, self.placement, self.dataflow)

    @cached_property
    def capacity(self) -> Floats:
        """Per rank, the bytes left for activations and stashes."""
        return np.array(self.memory) - self.resident

    @cached_property
    def usable_capacity(self) -> Floats:
        """Per rank, the bytes of its capacity that an order can fill; see `limits.py`."""
        if not self.is_even:
            return self.capacity
        stages = [list[tuple[float, float]]() for _ in range(self.ranks)]
        pairs = zip(self.activation.tolist(), self.stash.tolist(), strict=True)
        for rank, pair in zip(self.placement.rank_of_stage, pairs, strict=True):
            stages[rank].append(pair)
        ranks = list(zip(self.capacity.tolist(), map(tuple, stages), strict=True))
        # Many ranks are alike.
        most = {rank: usable_capacity(*rank, self.microbatches) for rank in set(ranks)}
        return np.array([most[rank] for rank in ranks])

    @cached_property
    def work(self) -> Floats:
        """Per rank, the seconds of all its F, I and W."""
        seconds = self.forward + self.backward_input + self.backward_weight
        holder = np.array(self.placement.rank_of_stage)
        return np.bincount(holder, self.microbatches * seconds, self.ranks).astype(np.float64)

    @cached_property
    def least_bytes(self) -> Floats:
        """Per rank, the least bytes of any schedule: one microbatch at a time."""
        stages, largest = self.stages, float(self.scales.max())
        taken, left = (
            self.costs.per_stage(f"{name}_bytes", stages)
            for name in ("activation", "weight_stash")
        )
        one = np.maximum(taken, left) * largest
        return self.resident + np.bincount(self.placement.rank_of_stage, one, self.ranks)

    @cached_property
    def missing_bytes(self) -> Floats:
        """Per rank, the bytes by which it misses its limit; none are missing up to 0.

        What just fits, but for the last bit of a sum, fits.
        """
        missing = self.least_bytes - np.array(self.memory)
        fits = self.least_bytes - self.resident <= self.capacity * (1 + _GRACE)
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


def _mean(each: Floats) -> Floats:
    """Return the mean over the microbatches; exact if all are equal."""
    is_even = (each == each[:, :1]).all()
    mean: Floats = each[:, 0] if is_even else each.mean(axis=1)
    return mean
