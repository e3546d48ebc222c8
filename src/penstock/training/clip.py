"""The norm of all gradients of a model whose parameters are spread over ranks, and clipping by it.

Every gradient counts once: shards are summed over the ranks of their mesh, copies are taken from
one, and a tied parameter from the first rank that holds it.
"""

import math
import struct
from collections.abc import Collection, Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from penstock.errors import ArgumentError
from penstock.ranks.control import Control

__all__ = ["clip_gradients", "total_norm"]

_NUMBER = struct.Struct("!d")
# The process groups that a gradient is spread over; none if this rank holds it whole.
_Spread: TypeAlias = tuple[dist.ProcessGroup, ...]


def total_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float,
    control: Control,
    *,
    counted_elsewhere: Collection[nn.Parameter],
) -> float:
    """Return the norm of the whole model's gradients on every rank; all ranks call it."""
    if not norm_type > 0:
        raise ArgumentError(f"norm_type must be above 0, or infinity (got {norm_type})")
    shares: dict[_Spread, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter not in counted_elsewhere:
            spread, share = _share(parameter.grad)
            shares.setdefault(spread, []).append(share)
    mine = _fetch([_sum_share(spread, same, norm_type) for spread, same in shares.items()])
    everyone = control.gather_bytes(_NUMBER.pack(_join(mine, norm_type)))
    joined = _join([_NUMBER.unpack(data)[0] for data in everyone], norm_type)
    return joined if math.isinf(norm_type) else joined ** (1.0 / norm_type)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients of this norm down to `max_norm`, by torch's own formula."""
    factor = max_norm / (norm + 1e-6)
    # Written so that a norm of NaN shows in every gradient, as it does in torch.
    if not factor >= 1.0:
        local = [_share(p.grad)[1] for p in parameters if p.grad is not None]
        for gradient in local:
            gradient.mul_(factor)


def _share(gradient: torch.Tensor) -> tuple[_Spread, torch.Tensor]:
    """Return this rank's part of a gradient, and the groups that hold the rest."""
    if not isinstance(gradient, DTensor):
        return (), gradient.detach()
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    spread = tuple(
        gradient.device_mesh.get_group(dimension)
        for dimension, placement in enumerate(gradient.placements)
        if not isinstance(placement, Replicate)
    )
    local: torch.Tensor = gradient.to_local().detach()
    return spread, local


def _fetch(totals: list[torch.Tensor]) -> list[float]:
    """Return numbers from a device, for which the host waits once."""
    if not totals:
        return []
    numbers: list[float] = torch.stack([total.to(totals[0].device) for total in totals]).tolist()
    return numbers


def _sum_share(spread: _Spread, shares: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the sum of powers over what these groups hold together, or the largest value."""
    largest = math.isinf(norm_type)
    norm = torch.nn.utils.get_total_norm(shares, norm_type).double()
    total = norm if largest else norm**norm_type
    for group in spread:
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
    return total


def _join(totals: Iterable[float], norm_type: float) -> float:
    parts = torch.tensor([0.0, *totals], dtype=torch.float64)
    return float(parts.max() if math.isinf(norm_type) else parts.sum())
