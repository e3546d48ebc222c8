"""Runs of a model that leave no trace, whether it is measured, traced or run on an example.

Restored are attributes, hooks, buffers and gradients of the modules, and random numbers. A
parameter's value is not, because a forward and its backward never change it.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["same_random_numbers", "untouched"]


@contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run these modules, then restore what that has changed or replaced.

    Gradients are None meanwhile.
    """
    inner = _find_all(modules)
    tables = [table for module in inner for table in _copy_tables(module)]
    buffers = [
        (buffer, buffer.detach().clone())
        for module in inner
        for buffer in module._buffers.values()
        if buffer is not None
    ]
    gradients = {p: p.grad for module in inner for p in module.parameters(recurse=False)}
    for parameter in gradients:
        parameter.grad = None
    try:
        with same_random_numbers():
            yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _find_all(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return these modules with all inside, also those that are attributes but not children."""
    found: dict[nn.Module, None] = {}
    waiting = list(modules)
    while waiting:
        for module in waiting.pop().modules():
            if module not in found:
                found[module] = None
                values = vars(module).values()
                waiting.extend(value for value in values if isinstance(value, nn.Module))
    return list(found)


def _copy_tables(module: nn.Module) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Return a module's attributes and the dicts among them, each with a copy of it.

    Hooks belong to them: a model that registers some once, and remembers that in an attribute,
    would otherwise register them again.
    """
    yield module.__dict__, dict(module.__dict__)
    for value in module.__dict__.values():
        if isinstance(value, dict):
            yield value, dict(value)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Draw random numbers, then reset the generators of Python, NumPy and torch."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    # Asking for the generators of unused devices would start CUDA, which takes memory.
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
