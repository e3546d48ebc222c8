"""The boundary of a stage's graph: how tensors enter and leave it, and where a backward starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from penstock.deferred.own_pass import find_edge
from penstock.errors import BoundaryError
from penstock.ir.dataflow import Routed
from penstock.step.backward import Root

__all__ = ["InFlight", "constant", "edges_of", "enter", "values_for_parts"]


@dataclass(slots=True)
class InFlight:
    """A microbatch between its forward and the backward that frees its graph.

    `inputs` are the received tensors that need gradients, by producer. `edges` are the outputs
    that need gradients, by consumer. `is_observed` says whether hooks on the inputs ask if a pass
    through this graph is the stage's own.
    """

    inputs: list[list[torch.Tensor]]
    is_replayed: bool = False
    is_observed: bool = False
    edges: Sequence[Sequence[GradientEdge]] = ()
    roots: list[Root] = field(default_factory=list)

    def join_roots(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[Root]:
        """Return where the backward starts: losses, and outputs with their gradients.

        An output that went to several stages is listed once for each; autograd adds them up.
        """
        roots = self.roots
        if gradients:
            for edges, column in zip(self.edges, gradients, strict=True):
                roots.extend(zip(edges, column, strict=True))
        return roots


class _Enter(torch.autograd.Function):
    """The step from a received leaf to an ordinary tensor, which the module may write to."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return gradient


def enter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a received tensor in a form that the module may write to in place."""
    return _Enter.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]  # untyped upstream


def values_for_parts(output: Any, parts: Sequence[int]) -> list[Any]:
    """Return what goes to each part of the model: the value made for it, or the whole output."""
    if not isinstance(output, Routed):
        return [output] * len(parts)
    if set(output.values) != set(parts):
        raise BoundaryError(
            f"a stage must make values for the parts {sorted(parts)} that it feeds (got values "
            f"for {sorted(output.values)}); use the dataflow and the stages of the same split"
        )
    return [output.values[part] for part in parts]


def edges_of(tensors: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Return where tensors are in their graph, except those that need no gradient."""
    return [find_edge(tensor) for tensor in tensors if tensor.requires_grad]


@lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a number as a tensor, from the cache because the weights of losses repeat.

    The device fills it in: a copy from the host would make the host wait.
    """
    return torch.full((), value, dtype=dtype, device=device)
