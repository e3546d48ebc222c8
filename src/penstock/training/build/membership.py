"""Whether this process belongs to a pipeline's group, and whether it was meant to have one."""

import os
import warnings
from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ArgumentError
from penstock.parallel.groups import groups_beside
from penstock.splitting.pipe import Pipe
from penstock.step.stage import Stage

__all__ = ["find_group", "groups_of_copies", "warn_without_group"]


def find_group(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group that was given; refuse a process that is not in it."""
    if isinstance(given, DeviceMesh):
        if given.get_coordinate() is None:
            raise _outside(f"ranks: {given.mesh.flatten().tolist()}")
        return given.get_group()
    if given is not None and dist.get_rank(given) < 0:
        # torch gives the same number for every group that a process is not in.
        ranks = dist.get_process_group_ranks(given)
        raise _outside(f"ranks of the last one made without this process: {ranks}")
    return given


def _outside(members: str) -> ArgumentError:
    return ArgumentError(
        f"this process must be in the group that it was given (rank {dist.get_rank()} of "
        f"{dist.get_world_size()}, {members}); build the pipeline only on processes of its group"
    )


def groups_of_copies(stages: object) -> tuple[tuple[int, ...], ...]:
    """Return the processes that hold copies or shards of the stages that were given.

    Whatever else was given, the build refuses.
    """
    given = stages.stages if isinstance(stages, Pipe) else stages
    values = given.values() if isinstance(given, Mapping) else given
    if not isinstance(values, Iterable):
        return ()
    return groups_beside(module for module in values if isinstance(module, nn.Module))


def warn_without_group(ranks: int | None, stages: Iterable[Stage]) -> None:
    """Warn that one of several processes trains a whole model by itself, unless that is meant.

    That is meant if `ranks` was given, or if a stage is data-parallel.
    """
    world = _world_size(os.environ.get("WORLD_SIZE"), os.environ.get("RANK"))
    if ranks is None and world > 1 and all(stage.replica.is_alone for stage in stages):
        warnings.warn(
            f"{world} processes were started, but without group= each of them runs all ranks and "
            "trains its own model; give group=torch.distributed.group.WORLD, or ranks= if that is "
            "what you want",
            stacklevel=4,
        )


def _world_size(size: str | None, rank: str | None) -> int:
    """Return how many processes there are, according to torch or to torchrun."""
    if dist.is_initialized():
        return dist.get_world_size()
    is_launched = size is not None and size.isdecimal() and rank is not None
    return int(size) if is_launched and size is not None else 1
