"""Which links share a wire: two carry messages at once, compared with each alone.

alone      0 > 1   |-----|
           2 > 3   |-----|
at once    0 > 1   |-----|            nothing is shared: as long as the longer one
           2 > 3   |-----|
at once    0 > 1   |-----------|      a wire is shared: as long as one after the other
           2 > 3   |-----------|

Both directions of a link count as links of their own, since a wire may carry them side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts
from penstock.errors import ArgumentError
from penstock.measuring.between_ranks import measure_between_ranks, ring_of
from penstock.measuring.stability import is_stable, spread_of, warn_if_links_vary
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Message
from penstock.step.clocks import Clock, clock_for
from penstock.tensors.packet import Packet

__all__ = ["group_links", "measure_wires"]

# A link from one rank to another.
_Link: TypeAlias = tuple[int, int]

# The messages that a link carries in a round.
_MESSAGES = 4
# Rounds are repeated until they vary little, at most this often.
_MOST_TURNS = 4


def measure_wires(
    group: dist.ProcessGroup,
    *,
    device: torch.device | str | None = None,
    large_bytes: int = 4 << 20,
    repeats: int = 5,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
) -> tuple[tuple[int, ...], ...]:
    """Find which links between neighbouring ranks share a wire; every rank calls it.

    Return the table that `Costs.wires` takes: links with equal numbers share a wire, and those
    with 0 share none. Each link carries messages of `large_bytes` alone, and then at once with
    others. Rounds are repeated until they vary little, up to four times as often; if they vary
    too much even so, a `MeasurementWarning` says on which link.

    Whatever makes messages wait for one another looks like a wire. Between processes of one
    machine that is the processor, if it has fewer cores than messages need. Links between ranks
    that are not neighbours in a ring are not measured, and count as sharing none.
    """
    if large_bytes < 1 or repeats < 1:
        raise ArgumentError(
            f"large_bytes and repeats must be at least 1 (got {large_bytes} and {repeats})"
        )
    measure = partial(_measure, large_bytes=large_bytes, repeats=repeats)
    table, spread = measure_between_ranks(group, device, timeouts, measure)
    warn_if_links_vary(spread)
    return table


def group_links(
    alone: Mapping[_Link, float], together: Callable[[Sequence[_Link]], float]
) -> list[list[_Link]]:
    """Return the links by wire, from their seconds alone and what several take at once.

    Whether a link shares a wire is asked of one link of each wire, and of none if all links at
    once are as fast as alone.
    """

    def are_slowed(links: Sequence[_Link]) -> bool:
        seconds = [alone[link] for link in links]
        # At least halfway from side by side to the shortest after the longest.
        return together(links) > max(seconds) + min(seconds) / 2

    links = list(alone)
    if len(links) < 2 or not are_slowed(links):
        return [[link] for link in links]
    wires: list[list[_Link]] = []
    for link in links:
        for wire in wires:
            if are_slowed([wire[0], link]):
                wire.append(link)
                break
        else:
            wires.append([link])
    return wires


def _measure(
    transport: GroupTransport, device: torch.device, *, large_bytes: int, repeats: int
) -> tuple[tuple[tuple[int, ...], ...], dict[_Link, float]]:
    """Return the table of wires, and how much the seconds of each link alone vary."""
    ranks = transport.num_ranks
    links = [way for a, b in ring_of(ranks) for way in ((a, b), (b, a))]
    transport.open_channels(dict.fromkeys(links, 2))
    packet = Packet("T", [torch.zeros(large_bytes, dtype=torch.uint8, device=device)])
    clock = clock_for(device)

    def rounds_of(chosen: Sequence[_Link]) -> list[float]:
        return _repeat(transport, chosen, packet, clock, repeats)

    alone = {link: rounds_of([link]) for link in links}
    wires = group_links(
        {link: float(np.median(rounds)) for link, rounds in alone.items()},
        lambda chosen: float(np.median(rounds_of(chosen))),
    )
    table = np.zeros((ranks, ranks), dtype=np.int64)
    for number, wire in enumerate((wire for wire in wires if len(wire) > 1), 1):
        for sender, receiver in wire:
            table[sender, receiver] = number
    spread = {link: spread_of(np.array(rounds)) for link, rounds in alone.items()}
    return tuple(map(tuple, table.tolist())), spread


def _repeat(
    transport: GroupTransport,
    links: Sequence[_Link],
    packet: Packet,
    clock: Clock,
    repeats: int,
) -> list[float]:
    """Return the seconds of rounds until the last rank has its messages; the same everywhere."""
    rounds: list[float] = []
    for turn in range(_MOST_TURNS):
        # The first two rounds learn the shapes and warm up, and do not count.
        skipped = 2 if turn == 0 else 0
        for number in range(repeats + skipped):
            # All ranks begin together.
            transport.control.gather(None)
            mine = _carry(transport, links, packet, clock)
            longest = max(transport.control.gather(mine))
            rounds += [longest] if number >= skipped else []
        if is_stable({"round": [np.array(rounds)]}):
            break
    return rounds


def _carry(
    transport: GroupTransport, links: Sequence[_Link], packet: Packet, clock: Clock
) -> float:
    """Return the seconds in which this rank sends and receives what these links carry."""
    rank, numbers = transport.ranks[0], range(_MESSAGES)
    out, into = (
        [[Message(True, edge, number, *link) for edge, link in mine] for number in numbers]
        for mine in ([item for item in enumerate(links) if item[1][end] == rank] for end in (0, 1))
    )
    if not out[0] and not into[0]:
        return 0.0
    transport.begin_step(f"wires {links}".encode())
    for message in (message for arriving in into for message in arriving):
        transport.post_receive(message)
    begin = clock.mark()
    for leaving, arriving in zip(out, into, strict=True):
        for message in leaving:
            transport.send(message, packet)
        for message in arriving:
            transport.receive(message)
    end = clock.mark()
    transport.end_step()
    transport.remember_shapes()
    return clock.seconds(end) - clock.seconds(begin)
