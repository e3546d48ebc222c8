"""Cut a chain of pieces into stages, so that the slowest stage is as fast as it can be.

>>> from penstock.ir.placement import Placement
>>> layers = [Piece.of_weight(f"layers.{i}", 1) for i in range(6)]
>>> model = [Piece.of_weight("embedding", 1), *layers, Piece.of_weight("head", 2)]
>>> print(partition(model, Placement.loop(ranks=3)))
stage 0  rank 0  embedding .. layers.1  pieces: 3  3 s
stage 1  rank 1  layers.2 .. layers.4   pieces: 3  3 s
stage 2  rank 2  layers.5 .. head       pieces: 2  3 s
balance 100.0 %, slowest stage 3 s, slowest rank 3 s
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.costs import Costs
from penstock.errors import ArgumentError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.partition.criteria import best_cuts
from penstock.planner.partition.cuts import NoCuts
from penstock.planner.partition.demand import Demand
from penstock.planner.partition.misfit import explain_misfit
from penstock.planner.partition.pieces import Piece
from penstock.units import format_share
from penstock.untrusted import quote

__all__ = ["Partition", "find_partition", "partition"]


@dataclass(frozen=True, slots=True)
class Partition:
    """Pieces cut into stages: stage s holds the pieces from `cuts[s]` up to `cuts[s + 1]`.

    `memory` is the bytes that each rank has, where a cap was given. `is_best` says whether it is
    proven that no cuts have a faster slowest stage, among those a faster slowest rank, and among
    those more even stages. Without a cap, the slowest stage is the fastest in any case.
    """

    pieces: tuple[Piece, ...]
    placement: Placement
    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    memory: tuple[float, ...] | None
    is_best: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Per stage, how many pieces it holds."""
        return tuple(end - begin for begin, end in pairwise(self.cuts))

    @property
    def stages(self) -> tuple[tuple[Piece, ...], ...]:
        """Per stage, its pieces."""
        return tuple(self.pieces[begin:end] for begin, end in pairwise(self.cuts))

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Per stage, the seconds of one microbatch, forward and backward."""
        return self._per_stage(lambda piece: piece.seconds)

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        """Per stage, what it always holds and the activations of all microbatches in flight."""
        resident = self._per_stage(lambda piece: piece.resident_bytes)
        activations = self._per_stage(lambda piece: piece.activation_bytes)
        parts = zip(resident, self.in_flight, activations, strict=True)
        return tuple(held + count * each for held, count, each in parts)

    @property
    def rank_seconds(self) -> tuple[float, ...]:
        """Per rank, the seconds of one microbatch in all its stages."""
        return self._per_rank(self.stage_seconds)

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Per rank, the bytes of all its stages."""
        return self._per_rank(self.stage_bytes)

    @property
    def slowest_stage(self) -> int:
        """The number of the stage that takes most seconds."""
        return self.stage_seconds.index(max(self.stage_seconds))

    @property
    def balance(self) -> float:
        """The mean stage's seconds over those of the slowest: 1 is perfect."""
        slowest = max(self.stage_seconds)
        return sum(self.stage_seconds) / (len(self.stage_seconds) * slowest) if slowest else 1.0

    def describe_stage(self, stage: int) -> str:
        """Return the names of a stage's first and last piece."""
        held = self.stages[stage]
        return held[0].name if len(held) == 1 else f"{held[0].name} .. {held[-1].name}"

    def to_costs(self) -> Costs:
        """Return what the stages cost, for `simulate`."""
        return Costs(
            forward=self._per_stage(lambda piece: piece.forward),
            backward_input=self._per_stage(lambda piece: piece.backward_input),
            backward_weight=self._per_stage(lambda piece: piece.backward_weight),
            activation_bytes=self._per_stage(lambda piece: piece.activation_bytes),
            weight_stash_bytes=self._per_stage(lambda piece: piece.weight_stash_bytes),
            parameter_bytes=self._per_stage(lambda piece: piece.parameter_bytes),
            gradient_bytes=self._per_stage(lambda piece: piece.gradient_bytes),
            optimizer_bytes=self._per_stage(lambda piece: piece.optimizer_bytes),
            message_bytes=[stage[0].message_bytes for stage in self.stages],
            workspace_bytes=[max(p.workspace_bytes for p in stage) for stage in self.stages],
            host_action=max(piece.host_action for piece in self.pieces),
        )

    def __repr__(self) -> str:
        return (
            f"<Partition: {len(self.pieces)} pieces in {self.placement.num_stages} stages, "
            f"balance {format_share(self.balance)}, slowest stage {max(self.stage_seconds):.4g} s>"
        )

    def __str__(self) -> str:
        names = [self.describe_stage(stage) for stage in range(self.placement.num_stages)]
        rows = [
            (f"stage {stage}", f"rank {rank}", names[stage], f"pieces: {size}", f"{seconds:.4g} s")
            for stage, (rank, size, seconds) in enumerate(
                zip(self.placement.rank_of_stage, self.sizes, self.stage_seconds, strict=True)
            )
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        slowest = f"slowest stage {max(self.stage_seconds):.4g} s"
        rank = f"slowest rank {max(self.rank_seconds):.4g} s"
        return "\n".join([*lines, f"balance {format_share(self.balance)}, {slowest}, {rank}"])

    def _per_stage(self, amount: Callable[[Piece], float]) -> tuple[float, ...]:
        return tuple(sum(map(amount, stage)) for stage in self.stages)

    def _per_rank(self, per_stage: Sequence[float]) -> tuple[float, ...]:
        ranks = range(self.placement.num_ranks)
        return tuple(sum(per_stage[s] for s in self.placement.stages(rank)) for rank in ranks)


def partition(
    pieces: Sequence[Piece],
    placement: Placement,
    *,
    memory: float | Sequence[float] | None = None,
    in_flight: int | Sequence[int] = 1,
) -> Partition:
    """Cut pieces into stages so that the slowest stage is fastest, under a cap of bytes per rank.

    Among those cuts it takes the ones whose slowest rank is fastest, and of these the most even
    ones. `memory` is the cap, the same for all or one per rank; a rank holds the parameters of its
    stages with their gradients and optimizer state, and their activations once for every
    microbatch `in_flight` (the same for all, or one number per stage, such as
    `count_in_flight(schedule)` gives).

    >>> pieces = [Piece.of_weight(name, weight) for name, weight in zip("abcd", [1, 1, 1, 3])]
    >>> partition(pieces, Placement.loop(ranks=2)).sizes
    (3, 1)
    """
    if not isinstance(placement, Placement):
        raise ArgumentError(
            f"placement must be a Placement (got {quote(placement)}); write Placement.loop(4)"
        )
    if not pieces:
        raise SizeError("pieces must not be empty; give at least one piece per stage")
    stages = placement.num_stages
    if stages > len(pieces):
        raise SizeError(
            f"every stage needs a piece (pieces: {len(pieces)}, stages: {stages}); "
            f"use {len(pieces)} stages or fewer, or finer pieces"
        )
    demand = Demand.of(pieces, placement, memory, in_flight)
    found = find_partition(demand)
    if found is None:
        raise SizeError(explain_misfit(demand))
    return found


def find_partition(demand: Demand) -> Partition | None:
    """Return the best cuts for a demand, or None if no cuts keep the caps."""
    answer = best_cuts(demand.chain, demand.caps)
    if isinstance(answer, NoCuts):
        return None
    return Partition(
        pieces=demand.pieces,
        placement=demand.placement,
        cuts=answer.cuts,
        in_flight=demand.in_flight,
        memory=demand.memory,
        is_best=answer.is_proven,
    )
