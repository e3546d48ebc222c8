"""How a model is spread over a cluster: tensor, pipeline and data parallelism.

Devices are numbered with tensor innermost, then pipeline, then data: the devices of a rank are
neighbours, ranks come next, and replicas of the pipeline are furthest apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.planner.projection.cluster import Cluster

__all__ = ["Degrees", "degrees_for"]


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees of parallelism: devices per rank, ranks per pipeline, pipelines.

    >>> str(Degrees(tensor=8, pipeline=16, data=64))
    'tensor 8, pipeline 16, data 64'
    """

    tensor: int
    pipeline: int
    data: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        return f"tensor {self.tensor}, pipeline {self.pipeline}, data {self.data}"

    def is_tensor_inside(self, cluster: Cluster) -> bool:
        """Return whether the devices of every rank are in one node."""
        return cluster.devices_per_node % self.tensor == 0

    def is_data_inside(self, cluster: Cluster) -> bool:
        """Return whether the replicas of every device are in one node."""
        return cluster.devices_per_node % self.devices == 0

    def is_link_inside(self, cluster: Cluster, sender: int, receiver: int) -> bool:
        """Return whether two ranks of every pipeline are in one node, wherever it begins."""
        first, last = sorted((sender * self.tensor, receiver * self.tensor))
        length = self.tensor * self.pipeline
        return all(
            cluster.is_same_node(begin + first, begin + last)
            for begin in range(0, length * self.data, length)
        )


def degrees_for(cluster: Cluster, *, layers: int, microbatches: int) -> Iterator[Degrees]:
    """Yield every way to use all devices: tensor inside nodes, a layer per rank, even replicas.

    `microbatches` are those of a whole step, over all replicas.
    """
    for tensor in range(1, cluster.devices_per_node + 1):
        if cluster.devices_per_node % tensor:
            continue
        ranks = cluster.devices // tensor
        for pipeline in range(1, min(ranks, layers) + 1):
            data = ranks // pipeline
            if ranks % pipeline == 0 and microbatches % data == 0:
                yield Degrees(tensor, pipeline, data)
