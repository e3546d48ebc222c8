"""Refuses models with functions that have a backward of their own, which no traced graph keeps.

A graph has the operations of such a function's forward. Their derivative may be another one: that
of a rounding that lets gradients pass, or of a reversible layer.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_tracing.capture.failure import suggest_layers
from penstock.torch_private import FunctionBase

__all__ = ["refuse_own_backwards"]


def refuse_own_backwards(model: nn.Module, outputs: Iterable[Any]) -> None:
    """Raise if gradients of these outputs go through an `autograd.Function` in Python."""
    starts = [leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor)]
    for node in _nodes(starts):
        if isinstance(node, FunctionBase):
            name = type(node).__name__.removesuffix("Backward")
            raise ModelError(
                f"the model cannot be traced: {name} has a backward of its own, which is not in a "
                f"traced graph; {suggest_layers(model)}"
            )


def _nodes(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of the graphs of autograd that begin here, once."""
    seen: set[Any] = set()
    waiting = [node for node in starts if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions if following is not None]
