"""Combinations of settings, devices and channels that a pipeline refuses."""

import torch
import torch.distributed as dist

from penstock.errors import ArgumentError
from penstock.ranks.fault_injection import FaultInjection
from penstock.ranks.group_transport import GroupTransport
from penstock.training.build.rank_facts import RankFacts

__all__ = ["require_graphs", "require_names", "require_routes"]


def require_routes(members: GroupTransport, transport: str) -> None:
    """Refuse channels that are not what the user asked for."""
    others = {pair: kind for pair, kind in members.routes.items() if kind != transport}
    if transport != "auto" and others:
        (source, destination), kind = next(iter(others.items()))
        raise ArgumentError(
            f"transport={transport!r} cannot carry the messages from rank {source} to rank "
            f"{destination}, which use {kind}; it needs stages on CUDA devices in a group with "
            "the backend nccl, and peer memory ranks of one machine; give transport='auto'"
        )


def require_graphs(facts: RankFacts, device: torch.device) -> None:
    """Refuse CUDA graphs where there are none, or with a seed."""
    if facts.options.cuda_graphs and device.type != "cuda":
        raise ArgumentError(
            f"cuda_graphs needs stages on a CUDA device (device: {device}); leave it out, or move "
            "the stages there"
        )
    if facts.options.cuda_graphs and facts.seed is not None:
        raise ArgumentError(
            f"seed must be left out with cuda_graphs (got {facts.seed}), because a CUDA graph "
            "cannot set it again for every layer; leave out cuda_graphs or seed"
        )


def require_names(group: dist.ProcessGroup, fault_injection: FaultInjection | None) -> None:
    """Refuse fault injection where messages have no names."""
    if fault_injection is not None and dist.get_backend(group) != "gloo":
        raise ArgumentError(
            "fault_injection must be used with gloo, or with ranks that share a process, where "
            f"messages have names (got backend {dist.get_backend(group)}); leave it out"
        )
