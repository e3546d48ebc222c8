"""Copies of a pipeline side by side: what reducing their gradients costs, and what it saves."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.placement import Placement
from penstock.untrusted import quote, to_quantity

__all__ = ["Reduction", "divide_devices"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How replicas add up their gradients at the end of a step, with nothing beside it.

    `bandwidth` is the bytes per second between two replicas: each sends and receives its
    gradients but for one share, twice, as in a ring. Or `seconds` has what it takes, one number or
    one by number of replicas. If the optimizer's state is sharded, every replica holds its part.
    """

    bandwidth: float | None = None
    seconds: float | Mapping[int, float] = 0.0
    is_sharded: bool = False

    def __post_init__(self) -> None:
        if self.bandwidth is not None and not to_quantity(self.bandwidth):
            raise ArgumentError(
                "bandwidth must be a number of bytes per second above 0 "
                f"(got {quote(self.bandwidth)})"
            )
        given = self.seconds
        values = list(given.values()) if isinstance(given, Mapping) else [given]
        for value in values:
            if to_quantity(value) is None:
                raise ArgumentError(
                    "reduction_seconds must be numbers from 0, one or by number of replicas "
                    f"(got {quote(value)})"
                )
        if self.bandwidth is not None and given != 0.0:
            raise ArgumentError("give either bandwidth or reduction_seconds, not both")

    def of(self, costs: Costs, placement: Placement, replicas: int) -> float:
        """Return the seconds of the reduction on the rank with most gradients."""
        if replicas == 1:
            return 0.0
        if self.bandwidth is None:
            return self._given(replicas)
        stages = placement.num_stages
        gradients = costs.per_stage("gradient_bytes", stages)
        if not gradients.any():
            gradients = costs.per_stage("parameter_bytes", stages)
        most = float(np.bincount(placement.rank_of_stage, gradients).max())
        return 2 * (replicas - 1) / replicas * most / self.bandwidth

    def _given(self, replicas: int) -> float:
        if not isinstance(self.seconds, Mapping):
            return float(self.seconds)
        if replicas not in self.seconds:
            raise ArgumentError(
                f"reduction_seconds must have a number for {replicas} replicas "
                f"(got {quote(sorted(self.seconds))}); add it, or give a bandwidth"
            )
        return float(self.seconds[replicas])

    def shard(self, costs: Costs, stages: int, replicas: int) -> Costs:
        """Return the costs with the part of the optimizer's state that one replica holds."""
        if not self.is_sharded:
            return costs
        part = costs.per_stage("optimizer_bytes", stages) / replicas
        return replace(costs, optimizer_bytes=tuple(part.tolist()))


def divide_devices(devices: int, batch: int, most_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield ranks and replicas that use all devices and divide the batch evenly.

    >>> list(divide_devices(4, batch=8, most_ranks=12))
    [(1, 4), (2, 2), (4, 1)]
    """
    for ranks in range(1, min(devices, most_ranks) + 1):
        replicas, rest = divmod(devices, ranks)
        if not rest and batch % replicas == 0:
            yield ranks, replicas
