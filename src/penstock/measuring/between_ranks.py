"""Measuring between real ranks: a transport of their own, under the guard of joint calls."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from penstock.alive.guard_opening import open_guard
from penstock.alive.timeouts import Timeouts
from penstock.ranks.control import GroupControl
from penstock.ranks.group_transport import GroupTransport
from penstock.training.build.device import find_device

__all__ = ["measure_between_ranks", "ring_of"]

_Result = TypeVar("_Result")


def measure_between_ranks(
    group: dist.ProcessGroup,
    device: torch.device | str | None,
    timeouts: Timeouts,
    measure: Callable[[GroupTransport, torch.device], _Result],
) -> _Result:
    """Return what `measure` finds with a transport of its own; every rank calls it.

    Every rank gets the same `PeerLostError` if one is lost meanwhile.
    """
    chosen = find_device(device, {}, group)
    guard = open_guard(group, (), timeouts)
    try:
        with guard.call():
            control = GroupControl(group, connections=guard.connections)
            transport = GroupTransport(group, chosen, control=control)
        with guard.call(transport.abort):
            found = measure(transport, chosen)
            transport.close()
            return found
    finally:
        guard.close()


def ring_of(ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of neighbouring ranks in a ring, the lower one first.

    >>> ring_of(4), ring_of(2), ring_of(1)
    ([(0, 1), (0, 3), (1, 2), (2, 3)], [(0, 1)], [])
    """
    pairs = {(min(r, (r + 1) % ranks), max(r, (r + 1) % ranks)) for r in range(ranks)}
    return sorted((a, b) for a, b in pairs if a != b)
