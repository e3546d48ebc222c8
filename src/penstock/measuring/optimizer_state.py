"""How many bytes an optimizer keeps for the parameters of a module."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.torch_private import tree_leaves

__all__ = ["MakeOptimizer", "count_optimizer_bytes"]

# A class of optimizers, or a function that makes one for some parameters.
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


def count_optimizer_bytes(module: nn.Module, make: MakeOptimizer) -> int:
    """Return the bytes of the optimizer's state for the parameters that are trained.

    They are counted after one step on a copy of a parameter, once for each shape and type.
    """
    known: dict[tuple[torch.Size, torch.dtype, torch.device], int] = {}
    total = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            key = parameter.shape, parameter.dtype, parameter.device
            if key not in known:
                known[key] = _count_for(parameter, make)
            total += known[key]
    return total


def _count_for(parameter: nn.Parameter, make: MakeOptimizer) -> int:
    copy = nn.Parameter(parameter.detach().clone())
    copy.grad = torch.zeros_like(copy)
    optimizer = make([copy])
    optimizer.step()
    state = tree_leaves(optimizer.state[copy])
    return sum(kept.nbytes for kept in state if isinstance(kept, torch.Tensor))
