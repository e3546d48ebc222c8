"""What both strategies do with their processes: start a group, agree, and gather over replicas."""

import atexit
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from penstock.errors import ArgumentError
from penstock.integrations.layout import Layout

__all__ = [
    "all_reduce",
    "device_of",
    "gather",
    "join",
    "vote",
]


def device_of(devices: Sequence[torch.device] | None, local_rank: int) -> torch.device:
    """Return the device of a process, of which there must be one each."""
    if devices is None:
        return torch.device("cpu")
    if local_rank >= len(devices):
        raise ArgumentError(
            f"every process of a machine must have a device (got process {local_rank + 1}, and "
            f"devices={len(devices)}); give the Trainer or Fabric devices={local_rank + 1} or more"
        )
    return devices[local_rank]


def join(
    environment: ClusterEnvironment, *, nodes: int, processes: int, device: torch.device
) -> None:
    """Give this process its number, and open the process group if there are several."""
    environment.set_global_rank(environment.node_rank() * processes + environment.local_rank())
    environment.set_world_size(nodes * processes)
    vars(rank_zero_only)["rank"] = environment.global_rank()
    if environment.world_size() == 1 or dist.is_initialized():
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _find_group(layout: Layout, group: Any) -> Any:
    """Return a group that was asked for, or the replicas, if there are any."""
    # Lightning says "all processes" where its user says nothing.
    if group is not None and group is not dist.group.WORLD:
        return group
    if layout.mesh is None or layout.replicas == 1:
        return None
    return layout.mesh.get_group("replica")


def all_reduce(value: Any, layout: Layout, group: Any, how: Any) -> Any:
    """Reduce a tensor over replicas, because the ranks of a pipeline have one value together."""
    group = _find_group(layout, group)
    if not isinstance(value, torch.Tensor) or group is None:
        return value
    is_mean = isinstance(how, str) and how.lower() in ("mean", "avg")
    total = value.float() if is_mean and not value.is_floating_point() else value.clone()
    dist.all_reduce(
        total, dist.ReduceOp.SUM if how is None or isinstance(how, str) else how, group=group
    )
    return total / dist.get_world_size(group) if is_mean else total


def gather(tensor: torch.Tensor, layout: Layout, group: Any, *, has_graph: bool) -> torch.Tensor:
    """Return the tensors of all replicas, along a new dimension if there are several."""
    if has_graph:
        raise ArgumentError(
            "gathered tensors have no gradients (got sync_grads=True), because the pipeline has "
            "made its own; leave it out"
        )
    group = _find_group(layout, group)
    if group is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.stack(parts)


def vote(decision: bool, device: torch.device, *, is_all: bool) -> bool:
    """Return whether all processes, or any of them, have decided so."""
    if not dist.is_initialized():
        return decision
    votes = torch.tensor([int(decision)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN if is_all else dist.ReduceOp.MAX)
    return bool(votes)
