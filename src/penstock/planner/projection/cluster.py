"""A cluster: nodes of devices, and what messages and collectives take inside and between them."""

from dataclasses import dataclass, fields
from math import inf

from penstock.errors import ArgumentError
from penstock.untrusted import quote, to_quantity

__all__ = ["Cluster"]

_COUNTS = ("nodes", "devices_per_node")
_ABOVE_ZERO = ("bandwidth_inside", "bandwidth_between", "speed")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal devices, with links inside a node and between nodes.

    A bandwidth is bytes per second of one device in one direction, a latency the seconds of an
    empty message. `memory` is bytes of a device. `peak_flops` is the FLOP/s that a device can do
    at most, 0 if it is not known. `speed` is how many times faster a device is than the one on
    which the layers were measured.

    >>> cluster = Cluster(nodes=2, devices_per_node=8, bandwidth_inside=400e9,
    ...     bandwidth_between=50e9)
    >>> cluster.devices, cluster.all_reduce_seconds(1e9, devices=8, is_inside=True)
    (16, 0.004375)
    """

    nodes: int
    devices_per_node: int
    bandwidth_inside: float
    bandwidth_between: float
    latency_inside: float = 0.0
    latency_between: float = 0.0
    memory: float = inf
    peak_flops: float = 0.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in _COUNTS:
                if type(value) is not int or value < 1:
                    raise ArgumentError(
                        f"{name} must be a whole number from 1 (got {quote(value)})"
                    )
            elif value != inf and to_quantity(value) is None:
                raise ArgumentError(f"{name} must be a number from 0 (got {quote(value)})")
            elif name in _ABOVE_ZERO and value <= 0:
                raise ArgumentError(f"{name} must be above 0 (got {quote(value)})")

    @property
    def devices(self) -> int:
        """The number of devices in all."""
        return self.nodes * self.devices_per_node

    def is_same_node(self, one: int, other: int) -> bool:
        """Return whether two devices, by number, are in one node."""
        return one // self.devices_per_node == other // self.devices_per_node

    def message_seconds(self, size: float, *, is_inside: bool) -> float:
        """Return the seconds of a message of this many bytes from one device to another."""
        return self._latency(is_inside) + size / self._bandwidth(is_inside)

    def all_reduce_seconds(self, size: float, *, devices: int, is_inside: bool) -> float:
        """Return the seconds of an all-reduce of this many bytes around a ring of devices.

        A device sends each part of the data twice around: once to add up, once to hand out.
        """
        hops = 2 * (devices - 1)
        return hops * self.message_seconds(size / devices, is_inside=is_inside)

    def _bandwidth(self, is_inside: bool) -> float:
        return self.bandwidth_inside if is_inside else self.bandwidth_between

    def _latency(self, is_inside: bool) -> float:
        return self.latency_inside if is_inside else self.latency_between
