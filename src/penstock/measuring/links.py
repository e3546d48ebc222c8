"""How long messages take between real ranks, from round trips of a small and a large one.

Messages use the same transport as in a step.
"""

from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from penstock.alive.guard_opening import open_guard
from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts
from penstock.errors import ArgumentError
from penstock.ranks.control import GroupControl
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Message
from penstock.step.clocks import Clock, clock_for
from penstock.tensors.packet import Packet
from penstock.training.build.device import find_device

__all__ = ["Links", "measure_links"]

_SMALL_BYTES = 64
_Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Links:
    """Latency in seconds and bandwidth in bytes per second, from every rank to every rank.

    >>> Links(((0.0, 0.5), (0.5, 0.0)), ((1.0, 100.0), (100.0, 1.0))).transfer(200)
    ((0.0, 2.5), (2.5, 0.0))
    """

    latency: _Table
    bandwidth: _Table

    def transfer(self, message_bytes: float) -> _Table:
        """Return the seconds that a message needs on each link: `transfer` of `Costs`."""
        seconds = np.array(self.latency) + message_bytes / np.array(self.bandwidth)
        np.fill_diagonal(seconds, 0.0)
        return _freeze(seconds)


def measure_links(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str | None = None,
    large_bytes: int = 4 << 20,
    repeats: int = 20,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> Links:
    """Measure latency and bandwidth between neighbouring ranks; every rank calls it.

    Each number is the median of half a round trip, so that both directions of a link are equal.
    Ranks that are not neighbours in a ring never exchange messages in a loop or V placement:
    their links are assumed to be as slow as the slowest measured one. Messages are on `device`,
    by default the one that the group's backend supports. Every rank gets the same result, or the
    same `PeerLostError` if one is lost meanwhile.
    """
    if large_bytes <= _SMALL_BYTES or repeats < 1:
        raise ArgumentError(
            f"large_bytes must be more than {_SMALL_BYTES} and repeats at least 1 "
            f"(got {large_bytes} and {repeats})"
        )
    chosen = find_device(device, {}, group)
    guard = open_guard(group, (), timeouts)
    try:
        with guard.call():
            control = GroupControl(group, connections=guard.connections)
            transport = GroupTransport(group, chosen, control=control)
        with guard.call(transport.abort):
            return _measure(transport, chosen, large_bytes, repeats)
    finally:
        guard.close()


def _measure(
    transport: GroupTransport, device: torch.device, large_bytes: int, repeats: int
) -> Links:
    ranks = transport.num_ranks
    pairs = sorted({(min(r, (r + 1) % ranks), max(r, (r + 1) % ranks)) for r in range(ranks)})
    pairs = [(a, b) for a, b in pairs if a != b]
    transport.open_channels({way: 2 for a, b in pairs for way in ((a, b), (b, a))})
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in pairs:
        # One pair at a time, because pairs may share a link.
        mine = None
        if transport.ranks[0] in pair:
            sizes = (_SMALL_BYTES, large_bytes)
            mine = [_one_way(transport, pair, size, repeats, device) for size in sizes]
        small, large = transport.control.gather(mine)[pair[0]]
        found[pair] = small, (large_bytes - _SMALL_BYTES) / max(large - small, 1e-9)
    transport.close()
    return _complete(ranks, found)


def _one_way(
    transport: GroupTransport,
    pair: tuple[int, int],
    size: int,
    repeats: int,
    device: torch.device,
) -> float:
    """Return the median seconds of a message of this size, as the first of the two sees it."""
    packet = Packet("T", [torch.zeros(size, dtype=torch.uint8, device=device)])
    clock = clock_for(device)
    # The first two rounds learn the shapes and warm up, and do not count.
    seconds = [_round_trip(transport, pair, packet, clock) for _ in range(repeats + 2)]
    return median(seconds[2:]) / 2


def _round_trip(
    transport: GroupTransport, pair: tuple[int, int], packet: Packet, clock: Clock
) -> float:
    there = Message(True, 0, 0, pair[0], pair[1])
    back = Message(True, 1, 0, pair[1], pair[0])
    transport.begin_step(f"links {packet.tensors[0].numel()} {pair}".encode())
    begin = clock.mark()
    if transport.ranks[0] == pair[0]:
        transport.post_receive(back)
        transport.send(there, packet)
        transport.receive(back)
    else:
        transport.post_receive(there)
        transport.send(back, transport.receive(there))
    end = clock.mark()
    transport.end_step()
    transport.remember_shapes()
    return clock.seconds(end) - clock.seconds(begin)


def _complete(ranks: int, found: dict[tuple[int, int], tuple[float, float]]) -> Links:
    """Return both directions of what was measured, and the slowest values for the rest."""
    latency = np.full((ranks, ranks), max((seconds for seconds, _ in found.values()), default=0.0))
    bandwidth = np.full((ranks, ranks), min((rate for _, rate in found.values()), default=np.inf))
    for (a, b), (seconds, rate) in found.items():
        latency[a, b] = latency[b, a] = seconds
        bandwidth[a, b] = bandwidth[b, a] = rate
    np.fill_diagonal(latency, 0.0)
    return Links(_freeze(latency), _freeze(bandwidth))


def _freeze(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> _Table:
    return tuple(tuple(row) for row in table.tolist())
