"""How long messages take between real ranks, from round trips of a small and a large one.

Messages use the same transport as in a step.

rank a   post  send                       receive         the host posts a receive, and sends
rank b               receive  send                        a round trip has two of each, but the
         |-----------------------------------|            first ranks post before they wait
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.rows import Floats
from penstock.measuring.between_ranks import measure_between_ranks, ring_of
from penstock.measuring.busy_messages import time_busy_messages
from penstock.measuring.stability import is_stable, spread_of, warn_if_links_vary
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Message
from penstock.step.clocks import Clock, clock_for
from penstock.tensors.packet import Packet

__all__ = ["Links", "measure_links"]

_SMALL_BYTES = 64
# Round trips are repeated until they vary little, at most this often.
_MOST_TURNS = 4
_Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Links:
    """Latency in seconds and bandwidth in bytes per second, from every rank to every rank.

    `host_message` is the host's seconds for a message, on its sender and on its receiver, which
    the latency does not include. Where ranks compute on the host, it is what a message takes from
    their compute. `spread` has the interquartile range of the round trips as a
    share of their median, for each link that was measured, the larger one of both sizes.

    >>> Links(((0.0, 0.5), (0.5, 0.0)), ((1.0, 100.0), (100.0, 1.0))).transfer(200)
    ((0.0, 2.5), (2.5, 0.0))
    """

    latency: _Table
    bandwidth: _Table
    host_message: float = 0.0
    spread: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def transfer(self, message_bytes: float) -> _Table:
        """Return the seconds that a message needs on each link: `transfer` of `Costs`."""
        seconds = np.array(self.latency) + message_bytes / np.array(self.bandwidth)
        np.fill_diagonal(seconds, 0.0)
        return _freeze(seconds)

    def add_to(self, costs: Costs) -> Costs:
        """Return costs with these links and their host seconds, for their largest message."""
        largest = float(np.max(costs.message_bytes))
        return replace(costs, transfer=self.transfer(largest), host_message=self.host_message)


def measure_links(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str | None = None,
    large_bytes: int = 4 << 20,
    repeats: int = 20,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> Links:
    """Measure latency and bandwidth between neighbouring ranks; every rank calls it.

    Each number is the median of half a round trip, so that both directions of a link are equal,
    less what the hosts spend on it. Round trips are repeated until they vary little, up to four
    times as often; if they vary too much even so, a `MeasurementWarning` says on which link.
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
    measure = partial(_measure, large_bytes=large_bytes, repeats=repeats)
    links = measure_between_ranks(group, device, timeouts, measure)
    warn_if_links_vary(links.spread)
    return links


def _measure(
    transport: GroupTransport, device: torch.device, *, large_bytes: int, repeats: int
) -> Links:
    ranks = transport.num_ranks
    pairs = ring_of(ranks)
    transport.open_channels({way: 2 for a, b in pairs for way in ((a, b), (b, a))})
    # One pair at a time, because pairs may share a link.
    found = {
        pair: [
            _repeat(transport, pair, size, repeats, device) for size in (_SMALL_BYTES, large_bytes)
        ]
        for pair in pairs
    }
    links = _complete(ranks, found, large_bytes)
    if device.type == "cpu" and pairs:
        links = replace(links, host_message=time_busy_messages(transport, repeats))
    return links


def _repeat(
    transport: GroupTransport,
    pair: tuple[int, int],
    size: int,
    repeats: int,
    device: torch.device,
) -> Floats:
    """Return round trips of this size, a row each, as the first of the two sees them.

    Every rank gets the same, so all agree on whether they vary too much.
    """
    packet = Packet("T", [torch.zeros(size, dtype=torch.uint8, device=device)])
    clock = clock_for(device)
    rows: list[tuple[float, float]] = []
    for turn in range(_MOST_TURNS):
        mine: list[tuple[float, float]] = []
        if transport.ranks[0] in pair:
            # The first two rounds learn the shapes and warm up, and do not count.
            skipped = 2 if turn == 0 else 0
            trips = [_round_trip(transport, pair, packet, clock) for _ in range(repeats + skipped)]
            mine = trips[skipped:]
        rows += transport.control.gather(mine)[pair[0]]
        if is_stable({"round trip": [np.array(rows)[:, 0]]}):
            break
    return np.array(rows)


def _round_trip(
    transport: GroupTransport, pair: tuple[int, int], packet: Packet, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of a round trip, and those of the host for posting and sending."""
    there = Message(True, 0, 0, pair[0], pair[1])
    back = Message(True, 1, 0, pair[1], pair[0])
    is_first = transport.ranks[0] == pair[0]
    receive, send = (back, there) if is_first else (there, back)
    transport.begin_step(f"links {packet.tensors[0].numel()} {pair}".encode())
    posted = _timed(lambda: transport.post_receive(receive))
    begin = clock.mark()
    if is_first:
        sent = _timed(lambda: transport.send(send, packet))
        transport.receive(receive)
    else:
        arrived = transport.receive(receive)
        sent = _timed(lambda: transport.send(send, arrived))
    end = clock.mark()
    transport.end_step()
    transport.remember_shapes()
    return clock.seconds(end) - clock.seconds(begin), (posted + sent) / 2


def _timed(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _complete(
    ranks: int, found: Mapping[tuple[int, int], Sequence[Floats]], large_bytes: int
) -> Links:
    """Return both directions of what was measured, and the slowest values for the rest."""
    numbers: dict[tuple[int, int], tuple[float, float]] = {}
    hosts = [float(np.median(small[:, 1])) for small, _ in found.values()]
    for (pair, (small, large)), host in zip(found.items(), hosts, strict=True):
        quick, slow = (float(np.median(trips[:, 0])) / 2 for trips in (small, large))
        rate = (large_bytes - _SMALL_BYTES) / max(slow - quick, 1e-9)
        numbers[pair] = max(0.0, quick - host), rate
    slowest = max((seconds for seconds, _ in numbers.values()), default=0.0)
    latency = np.full((ranks, ranks), slowest)
    bandwidth = np.full(
        (ranks, ranks), min((rate for _, rate in numbers.values()), default=np.inf)
    )
    for (a, b), (seconds, rate) in numbers.items():
        latency[a, b] = latency[b, a] = seconds
        bandwidth[a, b] = bandwidth[b, a] = rate
    np.fill_diagonal(latency, 0.0)
    spread = {pair: max(spread_of(t[:, 0]) for t in trips) for pair, trips in found.items()}
    host = float(np.median(hosts)) if hosts else 0.0
    return Links(_freeze(latency), _freeze(bandwidth), host, spread)


def _freeze(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> _Table:
    return tuple(tuple(row) for row in table.tolist())
