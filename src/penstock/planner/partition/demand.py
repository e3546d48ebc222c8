"""The demand of pieces on ranks, checked and in whole numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

import numpy as np

from penstock.errors import ArgumentError, CostsError
from penstock.ir.placement import Placement
from penstock.planner.partition.chain import UNLIMITED, Chain, add_up, count_ticks
from penstock.planner.partition.pieces import Piece

__all__ = ["Demand"]

# More bytes than any machine has, and few enough to be added up.
_MOST_BYTES = 1 << 48


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Pieces on a placement, with microbatches in flight per stage and a cap per rank."""

    pieces: tuple[Piece, ...]
    placement: Placement
    in_flight: tuple[int, ...]
    memory: tuple[float, ...] | None

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        placement: Placement,
        memory: float | Sequence[float] | None,
        in_flight: int | Sequence[int],
    ) -> "Demand":
        """Give every rank its cap, and every stage its microbatches in flight."""
        counts = _spread("in_flight", in_flight, placement.num_stages, "stage")
        if any(count != int(count) for count in counts):
            raise ArgumentError(
                f"in_flight must be whole numbers of microbatches (got {in_flight})"
            )
        caps = None
        if memory is not None:
            caps = _spread("memory", memory, placement.num_ranks, "rank")
        return cls(tuple(pieces), placement, tuple(map(int, counts)), caps)

    @property
    def chain(self) -> Chain:
        """The pieces as whole ticks and bytes, added up from the first on."""
        bytes_of_stage = {count: self._bytes(count) for count in set(self.in_flight)}
        seconds = [piece.seconds for piece in self.pieces]
        if max(map(sum, bytes_of_stage.values())) > _MOST_BYTES:
            raise CostsError("the pieces take too many bytes to add up; use a larger unit")
        table = np.array([bytes_of_stage[count] for count in self.in_flight])
        return Chain(self.placement, add_up(count_ticks(seconds)), add_up(table))

    def _bytes(self, in_flight: int) -> list[int]:
        """Return the bytes of every piece in a stage with these microbatches in flight."""
        return [
            ceil(piece.resident_bytes) + in_flight * ceil(piece.activation_bytes)
            for piece in self.pieces
        ]

    @property
    def caps(self) -> tuple[int, ...]:
        """The most whole bytes per rank."""
        if self.memory is None:
            return (UNLIMITED,) * self.placement.num_ranks
        return tuple(floor(min(cap, _MOST_BYTES)) for cap in self.memory)


def _spread(name: str, given: float | Sequence[float], count: int, each: str) -> tuple[float, ...]:
    """Return one number for each rank or stage."""
    values = tuple(given) if isinstance(given, Sequence) else (given,) * count
    if len(values) != count:
        raise ArgumentError(
            f"{name} has {len(values)} values for {count} {each}s; "
            f"give one number, or one per {each}"
        )
    if not all(value >= 0 for value in values):
        raise ArgumentError(f"{name} must be numbers from 0 up (got {given})")
    return values
