"""Runs of a model that leave no trace: buffers, gradients and random numbers stay as they were."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["untouched"]


@contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let these modules be run, and put back what that has changed or replaced."""
    held = list(modules)
    inner = {module for outer in held for module in outer.modules()}
    buffers = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in inner
        for name, buffer in module._buffers.items()
    ]
    gradients = {p: p.grad for module in held for p in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for table, name, buffer, before in buffers:
            table[name] = buffer
            if buffer is not None and before is not None:
                buffer.detach().copy_(before)
