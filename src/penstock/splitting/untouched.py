"""Runs of a model that leave no trace: buffers, gradients and random numbers stay as they were."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

__all__ = ["same_random_numbers", "untouched"]


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Let random numbers be drawn, and put Python's, NumPy's and torch's generators back."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Devices that nobody uses yet have none: to ask for it would start CUDA, which takes memory.
    before = [generator.get_state() for generator in _device_generators()]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        for number, generator in enumerate(_device_generators()):
            if before:
                generator.set_state(before[number])
            else:
                generator.manual_seed(generator.initial_seed())


def _device_generators() -> tuple[torch.Generator, ...]:
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped upstream
    return tuple(torch.cuda.default_generators) if is_in_use else ()


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
        with same_random_numbers():
            yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for table, name, buffer, before in buffers:
            table[name] = buffer
            if buffer is not None and before is not None:
                buffer.detach().copy_(before)
