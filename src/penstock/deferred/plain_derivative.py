"""Differentiating a deferred call as plain autograd would, from its inputs.

A weight gradient is deferred only in the stage's own backward pass. In any other pass the call
runs again with its real inputs, and autograd differentiates it, to any order. Such calls are
products, without random numbers or state, so that running them again gives the same result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.deferred.calls import CastTo

__all__ = ["run_again"]


def run_again(
    function: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    needs: Sequence[bool],
    gradient: torch.Tensor,
    cast: CastTo,
) -> list[torch.Tensor | None]:
    """Return the gradients of the arguments that need one, positional ones first.

    They have graphs of their own if the current pass creates graphs.
    """
    creates_graph = torch.is_grad_enabled()
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    needed = [name for name, is_needed in zip(given, needs, strict=True) if is_needed]
    with torch.enable_grad(), cast():
        # Views, so that the pass ends here: an input may depend on the weight, and have hooks.
        aliases = {name: given[name].view_as(given[name]) for name in needed}
        used = {**given, **aliases}
        positional = [used[number] for number in range(len(args))]
        output = function(*positional, **{name: used[name] for name in kwargs})
    wanted = tuple(aliases.values())
    found = torch.autograd.grad(
        output, wanted, gradient, create_graph=creates_graph, allow_unused=True
    )
    gradients = dict(zip(needed, found, strict=True))
    return [gradients.get(name) for name in given]
