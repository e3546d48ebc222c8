"""What all processes of a run do together besides steps."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.integrations.layout import Layout
from penstock.integrations.sharing import share

__all__ = ["barrier", "broadcast", "choose_seed", "share_random_states", "start_alike"]


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()


def broadcast(value: Any, source: int = 0) -> Any:
    """Return the value of one process on all of them."""
    if not dist.is_initialized():
        return value
    return share(lambda: value, "the value", source=source)


def start_alike() -> None:
    """Give every process the generator of the first, from which the order of data is drawn."""
    torch.set_rng_state(broadcast(torch.get_rng_state()))


def share_random_states(layout: Layout) -> None:
    """Give the ranks of a pipeline the generators of its first one, which data are drawn from."""
    if layout.mesh is None:
        return
    group = layout.mesh.get_group("pipeline")
    python, numpy, cpu = share(_random_states, "the random states", group=group)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


def _random_states() -> tuple[Any, Any, torch.Tensor]:
    numpy = np.random.get_state(legacy=False)
    state = numpy["state"] | {"key": numpy["state"]["key"].tolist()}
    return random.getstate(), numpy | {"state": state}, torch.get_rng_state()


def choose_seed(seed: int | None) -> int:
    """Return the seed that was given, or the one that the first process was seeded with."""
    return int(broadcast(torch.initial_seed() % 2**31)) if seed is None else seed
