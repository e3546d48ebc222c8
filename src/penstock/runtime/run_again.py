"""Differentiates a call as plain autograd would, from its inputs.

A call whose weight gradient is deferred gives up only its own pass to that. In any other pass it
is run again with its real inputs, and autograd does all of it, to any order of derivative. The
calls are products without random numbers or memory, so that they come out the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.runtime.recording import CastTo

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

    They have graphs of their own where the pass that runs now is to have one.
    """
    creates_graph = torch.is_grad_enabled()
    with torch.enable_grad(), cast():
        output = function(*args, **kwargs)
    given = [*args, *kwargs.values()]
    wanted = [value for value, is_needed in zip(given, needs, strict=True) if is_needed]
    found = iter(
        torch.autograd.grad(
            output, wanted, gradient, create_graph=creates_graph, allow_unused=True
        )
    )
    return [next(found) if is_needed else None for is_needed in needs]
