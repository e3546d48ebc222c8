"""What `penstock verify` runs: a small model cut into stages, with one batch."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.tensors.tree import map_tensors

__all__ = ["Case", "in_double"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model cut into stages, the arguments of the first stage, the target and the loss.

    The output of a stage is the input of the next one; `loss(output, target)` gives a number that
    is a mean over the rows of the batch. The model must have no randomness such as dropout, and
    nothing that depends on the whole batch, because these cannot be the same in microbatches.

    A function for `penstock verify --model module:function` takes the number of stages and
    returns a `Case`, or a tuple of the same four values.
    """

    stages: Sequence[nn.Module]
    args: tuple[Any, ...]
    target: Any
    loss: Callable[..., torch.Tensor]


def in_double(case: Case) -> Case:
    """Return a copy in float64, in which rounding cannot hide a mistake."""
    stages = [stage.double() for stage in deepcopy(list(case.stages))]
    return Case(
        stages, map_tensors(_widen, case.args), map_tensors(_widen, case.target), case.loss
    )


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
