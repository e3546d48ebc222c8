"""The processes that hold copies or shards of a module."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["groups_beside"]


def groups_beside(modules: Iterable[nn.Module]) -> tuple[tuple[int, ...], ...]:
    """Return, by their ranks among all, the groups of processes over which modules are spread.

    These are the groups of DDP, and the meshes of parameters that are sharded or replicated.
    """
    found: set[tuple[int, ...]] = set()
    for module in modules:
        for child in module.modules():
            if isinstance(child, DistributedDataParallel):
                found.add(tuple(dist.get_process_group_ranks(child.process_group)))
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                found.add(_ranks_of(parameter.device_mesh))
    return tuple(sorted(group for group in found if len(group) > 1))


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())
