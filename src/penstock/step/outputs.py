"""Outputs of microbatches, kept until they are merged into the output of the batch.

Outputs stay on the rank that computed them, so they keep their classes: dataclasses, named
tuples, mappings of any kind.
"""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.loss.weigher import Share
from penstock.tensors.output_tree import fill, find_tensors

__all__ = ["KeptOutput", "keep_output"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptOutput:
    """The output of one microbatch, cut off from its graph.

    `losses` has the numbers of the tensors in it that are losses of the microbatch, and `weight`
    is what they count for in those of the batch.
    """

    value: Any
    losses: frozenset[int]
    weight: float


def keep_output(output: Any, loss: object, share: Share) -> KeptOutput:
    """Keep the output of a microbatch, whose loss may be one of the tensors in it.

    So are single numbers that the model calls `loss`, or something that ends in `_loss`. `share`
    is what the loss counts for in that of the batch.
    """
    found = list(find_tensors(output))
    losses = frozenset(
        number
        for number, (name, tensor) in enumerate(found)
        if tensor is loss or (_is_called_loss(name) and not tensor.dim())
    )
    values = [
        _with_parts(tensor.detach(), share) if tensor is loss else tensor.detach()
        for _, tensor in found
    ]
    return KeptOutput(fill(output, values), losses, share.weight)


def _with_parts(loss: torch.Tensor, share: Share) -> torch.Tensor:
    """Return the number that gives the whole contribution of a loss times the share's weight."""
    for part in share.parts if share.weight else ():
        loss = loss + part.value.detach() * (part.weight / share.weight)
    return loss


def _is_called_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")
