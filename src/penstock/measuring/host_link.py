"""How fast a device exchanges bytes with its host, which limits what a plan can offload."""

from statistics import median
from time import perf_counter

import torch

from penstock.step.saved.copies import CopyEngine

__all__ = ["measure_host_link"]

_BYTES = 64 * 2**20
_ROUNDS = 7


def measure_host_link(device: torch.device) -> float | None:
    """Return the bytes a second to the host and, at the same time, back.

    The copies are those of OFFLOAD and RELOAD. It is None for a CPU, where a copy takes the time
    of compute, so that nothing is gained by one.
    """
    if device.type == "cpu":
        return None
    engine = CopyEngine(device)
    source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    there, _ = engine.begin_out([source])
    seconds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize(device)
        begin = perf_counter()
        following, _ = engine.begin_out([source])
        _back, read = engine.begin_back(there)
        torch.cuda.synchronize(device)
        seconds.append(perf_counter() - begin)
        engine.release(there, read)
        there = following
    # The first rounds pin memory, which steps do once.
    return _BYTES / median(seconds[2:])
