"""The loss of several microbatches, computed in two ways: in one call, and from their losses."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.loss.joined import Joined

__all__ = ["SumOfLosses", "Together", "agree", "describe_gradients", "find_gradients"]


@dataclass(frozen=True, slots=True, eq=False)
class SumOfLosses:
    """A loss, and its gradient for each tensor of each microbatch's output."""

    value: float
    gradients: list[list[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """The loss of several microbatches in one call.

    `size` is the sum of the absolute values of its terms, from which its rounding is estimated.
    """

    made: SumOfLosses
    output: Joined
    size: float

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite, so that another one can be compared with it."""
        return math.isfinite(self.made.value)


def find_gradients(
    roots: Sequence[Any],
    factors: Sequence[float],
    loss: torch.Tensor,
    leaves: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the gradients of a weighted sum for the tensors of an output; zeros if unused."""
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if not roots or not trained or not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    starts = [loss.new_tensor(factor) for factor in factors]
    found = torch.autograd.grad(roots, trained, starts, allow_unused=True, materialize_grads=True)
    by_leaf = dict(zip(map(id, trained), found, strict=True))
    return [by_leaf.get(id(leaf), torch.zeros_like(leaf)) for leaf in leaves]


def agree(ours: SumOfLosses, together: Together, accuracy: float) -> bool:
    """Whether both give the same loss and gradients, as far as they can be compared.

    A loss that is not finite for the whole batch cannot be compared. If it is finite there, the
    sum of the losses must be finite too.
    """
    theirs = together.made
    scale = max(abs(theirs.value), together.size, 1e-30)
    if together.is_finite and not abs(ours.value - theirs.value) <= accuracy * scale:
        return False
    pairs = [(a, b) for a, b in _pair_gradients(ours, together) if b.numel()]
    sizes = [float(b.abs().max()) for _, b in pairs]
    if not all(map(math.isfinite, sizes)):
        return True
    most = accuracy * max(sizes, default=0.0) + 1e-30
    return all(float((a - b).abs().max()) <= most for a, b in pairs)


def _pair_gradients(
    ours: SumOfLosses, together: Together
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair both gradients of each tensor; those of a shared tensor are summed."""
    for place, is_shared in enumerate(together.output.is_shared):
        mine = [gradients[place] for gradients in ours.gradients]
        theirs = [gradients[place] for gradients in together.made.gradients]
        if is_shared:
            mine, theirs = [torch.stack(mine).sum(0)], [torch.stack(theirs).sum(0)]
        yield from zip(mine, theirs, strict=True)


def describe_gradients(ours: SumOfLosses, together: Together) -> str:
    """Return words for an error if only the gradients differ."""
    is_alike = f"{ours.value:.6g}" == f"{together.made.value:.6g}"
    return ", with other gradients" if is_alike else ""
