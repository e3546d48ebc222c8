"""The search space: microbatch size, placement, cuts and checkpointed stages.

size -> placement -> cuts -> checkpointed stages -> a problem that a schedule can solve, or not
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np

from penstock.costs import Costs, PerLink
from penstock.errors import ArgumentError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.limits import read_limits
from penstock.planner.order.families import fixed_schedules
from penstock.planner.partition.partition import Partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.checkpointing import (
    checkpoint,
    fewest_checkpoints,
    is_worth_checkpointing,
)
from penstock.planner.search.choices import Choices
from penstock.planner.search.cuts import cuts_for, cuts_for_speeds, rebalance
from penstock.planner.search.in_flight import count_in_flight
from penstock.planner.search.layouts import regular_placements
from penstock.planner.search.replicas import Reduction
from penstock.schedules.sizes import require_size, require_whole_number
from penstock.sim.period import Boundary, require_boundary
from penstock.untrusted import quote, to_quantity

__all__ = ["Candidate", "Space"]

# One replica has nothing to reduce.
_NO_REDUCTION = Reduction()


@dataclass(frozen=True)
class Candidate:
    """A problem and the choices that lead to it."""

    problem: SchedulingProblem
    choices: Choices

    @property
    def missing_bytes(self) -> float:
        """The bytes by which the worst rank misses its limit; none are missing below 0."""
        return float(self.problem.missing_bytes.max())

    @property
    def fullest_rank(self) -> int:
        """The rank that misses its limit by most, or is closest to it."""
        return int(self.problem.missing_bytes.argmax())


@dataclass(frozen=True)
class Space:
    """All that a search may choose: layers by microbatch size, for one batch on some ranks."""

    layers: Mapping[int, tuple[Piece, ...]]
    transfer: Mapping[int, PerLink]
    ranks: int
    batch: int
    memory: tuple[float, ...]
    boundary: Boundary
    factors: tuple[float, ...]
    replicas: int = 1
    reduction: Reduction = _NO_REDUCTION
    host_message: float = 0.0

    @classmethod
    def of(
        cls,
        layers: Sequence[Piece] | Mapping[int, Sequence[Piece]],
        ranks: int,
        batch: int,
        memory: float | Sequence[float] | None,
        transfer: PerLink | Mapping[int, PerLink],
        boundary: Boundary,
        factors: Sequence[float] | None = None,
    ) -> "Space":
        """Return the space of what a user gives, checked; a list of layers is for one row each."""
        by_size = dict(layers) if isinstance(layers, Mapping) else {1: layers}
        links = (
            dict(transfer) if isinstance(transfer, Mapping) else dict.fromkeys(by_size, transfer)
        )
        _check(by_size, links, ranks, batch)
        require_boundary(boundary)
        return cls(
            layers={size: tuple(pieces) for size, pieces in sorted(by_size.items())},
            transfer=links,
            ranks=ranks,
            batch=batch,
            memory=read_limits(memory, ranks),
            boundary=boundary,
            factors=_read_factors(factors, ranks),
        )

    def candidates(self) -> Iterator[Candidate]:
        """Yield every combination that is worth a look, the simplest first."""
        for size, layers in self.layers.items():
            for placement in regular_placements(self.ranks, most_stages=len(layers)):
                if self.batch % size == 0:
                    yield from _Subspace(self, size, placement).candidates()

    def has(self, placement: Placement, choices: Choices) -> bool:
        """Return whether choices, such as those of a plan, are possible here."""
        size = choices.microbatch_size
        is_size = size in self.layers and self.batch % size == 0
        is_cut = is_size and sum(choices.sizes) == len(self.layers[size])
        fits = placement.num_ranks == self.ranks and placement.num_stages == len(choices.sizes)
        return is_cut and fits and choices.replicas == self.replicas

    def candidate(self, placement: Placement, choices: Choices) -> Candidate:
        """Return the problem that choices lead to, whether or not it fits."""
        size, stages = choices.microbatch_size, placement.num_stages
        cut = Partition(
            pieces=self.layers[size],
            placement=placement,
            cuts=(0, *accumulate(choices.sizes)),
            in_flight=(1,) * stages,
            memory=None,
            is_best=False,
        )
        plain = replace(
            cut.to_costs(), transfer=self.transfer[size], host_message=self.host_message
        )
        plain = self.reduction.shard(self._slow_down(plain, placement), stages, self.replicas)
        costs = checkpoint(plain, choices.checkpointed, stages)
        seconds = self.reduction.of(plain, placement, self.replicas)
        return Candidate(
            SchedulingProblem(costs, placement, self.batch // size, self.memory, self.boundary),
            replace(choices, replicas=self.replicas, reduction_seconds=seconds),
        )

    def _slow_down(self, costs: Costs, placement: Placement) -> Costs:
        """Return the costs of stages on ranks of different speed."""
        if set(self.factors) == {1.0}:
            return costs
        factors = np.array(self.factors)[list(placement.rank_of_stage)]
        slower = {
            name: tuple((factors * costs.per_stage(name, placement.num_stages)).tolist())
            for name in ("forward", "backward_input", "backward_weight")
        }
        return replace(costs, **slower)  # type: ignore[arg-type]  # names of seconds

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates in which one stage more or less is checkpointed."""
        placement, chosen = candidate.problem.placement, set(candidate.choices.checkpointed)
        if not self.can_checkpoint(candidate):
            return []
        flipped = [tuple(sorted(chosen ^ {stage})) for stage in range(placement.num_stages)]
        return [
            self.candidate(placement, replace(candidate.choices, checkpointed=stages))
            for stages in flipped
        ]

    def can_checkpoint(self, candidate: Candidate) -> bool:
        """Return whether there is a limit, and it is known that checkpoints save bytes."""
        plain = self.candidate(
            candidate.problem.placement, replace(candidate.choices, checkpointed=())
        )
        is_limited = bool(np.isfinite(self.memory).any())
        return is_limited and is_worth_checkpointing(plain.problem.costs, plain.problem.stages)


@dataclass(frozen=True)
class _Subspace:
    """The part of a space with one microbatch size and one placement."""

    space: Space
    size: int
    placement: Placement

    def candidates(self) -> Iterator[Candidate]:
        pieces, one = self.space.layers[self.size], (1,) * self.placement.num_stages
        least = self.in_flight[0] if self.in_flight else one
        chosen: dict[Choices, None] = {}
        cuts = cuts_for(pieces, self.placement, self.space.memory, least)
        if len(set(self.space.factors)) > 1:
            holder = self.placement.rank_of_stage
            sizes = cuts_for_speeds(pieces, holder, self.space.factors)
            cuts.append(replace(cuts[0], cuts=(0, *accumulate(sizes))))
        for cut in cuts:
            for stages in self._checkpoints(cut):
                chosen[self._choices(cut, stages)] = None
                if stages:
                    chosen[self._choices(rebalance(cut, stages), stages)] = None
        return (self.space.candidate(self.placement, choices) for choices in chosen)

    @cached_property
    def in_flight(self) -> list[tuple[int, ...]]:
        """Per family, the microbatches in flight per stage, fewest first."""
        free = (inf,) * self.space.ranks
        problem = SchedulingProblem(Costs(), self.placement, self.space.batch // self.size, free)
        found = {count_in_flight(schedule) for schedule in fixed_schedules(problem)}
        return sorted(found, key=lambda counts: (sum(counts), counts))

    def _checkpoints(self, cut: Partition) -> list[tuple[int, ...]]:
        """Return which stages to checkpoint: none, all, and as few as some family needs."""
        plain = self.space.candidate(self.placement, self._choices(cut, ()))
        if not self.space.can_checkpoint(plain):
            return [()]
        few = [fewest_checkpoints(plain.problem, counts) for counts in self.in_flight]
        return list(dict.fromkeys([(), *few, tuple(range(self.placement.num_stages))]))

    def _choices(self, cut: Partition, stages: tuple[int, ...]) -> Choices:
        return Choices(cut.sizes, stages, self.size)


def _read_factors(factors: Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    if factors is None:
        return (1.0,) * ranks
    values: object = factors
    numbers = [to_quantity(one) for one in factors] if isinstance(values, Sequence) else []
    if len(numbers) != ranks or not all(numbers):
        raise ArgumentError(
            f"rank_factors must be one number above 0 for each of the {ranks} ranks "
            f"(got {quote(factors)})"
        )
    return tuple(float(number) for number in numbers if number is not None)


def _check(
    layers: Mapping[int, Sequence[Piece]], links: Mapping[int, PerLink], ranks: int, batch: int
) -> None:
    for name, value in (("ranks", ranks), ("batch", batch)):
        require_whole_number(name, value)
    if ranks < 1 or batch < 1:
        raise SizeError(f"ranks and batch must be at least 1 (ranks: {ranks}, batch: {batch})")
    if set(layers) != set(links):
        raise ArgumentError("transfer must be one value, or have the same sizes as the layers")
    names = {size: [piece.name for piece in pieces] for size, pieces in layers.items()}
    if not layers or any(named != next(iter(names.values())) for named in names.values()):
        raise ArgumentError("every microbatch size must have the same layers, by name")
    fewest = min(map(len, names.values()))
    if fewest == 0:
        raise SizeError("layers must not be empty; give at least one layer per rank")
    if fewest < ranks:
        raise SizeError(
            f"every rank needs a layer (layers: {fewest}, ranks: {ranks}); use {fewest} ranks or "
            "fewer, or finer layers"
        )
    if any(type(size) is not int or size < 1 for size in layers):
        raise ArgumentError(
            f"microbatch sizes must be whole numbers of rows (got {', '.join(map(str, layers))})"
        )
    if all(batch % size for size in layers):
        sizes = ", ".join(map(str, sorted(layers)))
        raise SizeError(
            f"no microbatch size fills a batch of {batch} evenly (sizes: {sizes}); "
            "use a multiple of one of them"
        )
    require_size(ranks, max(1, batch // min(layers)))
