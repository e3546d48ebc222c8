"""Ranks that watch one another while they load and build, before they have a pipeline."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch.distributed as dist

from penstock.alive.guard_opening import open_guard
from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts

__all__ = ["watching"]


@contextmanager
def watching(
    group: dist.ProcessGroup | None = None, *, timeouts: Timeouts = DEFAULT_TIMEOUTS
) -> Iterator[None]:
    """Watch the ranks of a group from now on, or all processes; every rank enters at once.

    Put what comes before the first step in such a block, up to and with the building of the
    pipeline. A rank that is lost inside of it ends the block on all others with a `PeerLostError`
    that names it; a process that is busy with something else then has `stop_seconds` to come out
    of that. Without a process group, this does nothing.

    >>> with watching():
    ...     model = "load it, and build its pipeline"
    """
    if not dist.is_initialized():
        yield
        return
    world = dist.group.WORLD if group is None else group
    assert world is not None, "there is one where torch.distributed is running"
    # Loading may take as long as it does.
    patient = replace(timeouts, stall_seconds=math.inf)
    with closing(open_guard(world, (), patient)) as guard, guard.call():
        yield
