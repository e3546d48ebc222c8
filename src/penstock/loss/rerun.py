"""Calling a loss function once more, without leaving traces of that."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.step.outputs import fill, tensors_of

__all__ = ["as_leaves", "run_again"]


def as_leaves(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return an output like this one whose tensors begin a graph of their own, and these."""
    # No graph can begin at a tensor that was made in inference mode.
    values = [
        tensor.clone() if tensor.is_inference() else tensor.detach()
        for tensor in tensors_of(output)
    ]
    leaves = [
        value.requires_grad_(value.is_floating_point() or value.is_complex()) for value in values
    ]
    return fill(output, leaves), leaves


@contextmanager
def run_again(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep random states and the buffers of a loss's modules as they are, and record graphs.

    `tensors` say on which devices the loss runs. Compiled code runs as it was written, since other
    sizes would have to be compiled anew.
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    buffers = [buffer for module in _find_modules(function) for buffer in module.buffers()]
    with ExitStack() as stack:
        for kind in {device.type for device in devices} or {"cuda"}:
            indices = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(indices, device_type=kind))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        before = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def _find_modules(function: object, depth: int = 3) -> Iterator[nn.Module]:
    """The modules that a loss function is, or that it refers to directly."""
    match function:
        case nn.Module():
            yield function
            return
        case partial():
            held = [function.func, *function.args, *function.keywords.values()]
        case _:
            held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
            held.append(getattr(function, "__self__", None))
    for value in held if depth else ():
        if callable(value):
            yield from _find_modules(value, depth - 1)
