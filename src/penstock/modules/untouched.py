"""Runs of a model that leave no trace, whether it is measured, traced or run on an example.

`untouched` restores buffers, gradients and random numbers. A parameter's value needs no restoring,
because a forward and its backward never change it.

Attributes and hooks are restored after tracing only, because they may hold values that exist only
in the trace; see `same_attributes`. After a run with real values they stay, as after any other
run. A model that registers hooks in its first run remembers that in some object of its own, and
would register them twice or never again if only one of the two was restored.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["same_attributes", "same_random_numbers", "torch_random_states", "untouched"]


@contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run these modules, then restore the buffers, gradients and random numbers.

    Gradients are None meanwhile.
    """
    inner = dict.fromkeys(part for module in modules for part in module.modules())
    buffers = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in inner
        for name, buffer in module._buffers.items()
    ]
    gradients = {p: p.grad for module in inner for p in module.parameters(recurse=False)}
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


@contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Trace a model, then restore the attributes of its modules, and dicts among them.

    Hooks are in such dicts, and so are children and parameters.
    """
    tables = [table for module in model.modules() for table in _copy_tables(module)]
    try:
        yield
    finally:
        for table, before in tables:
            # A dict of a class of its own may refuse any change, and then has none.
            if not _is_same(table, before):
                table.clear()
                table.update(before)


def _is_same(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Return whether a dict has the same objects in the same order."""
    return [(key, id(value)) for key, value in table.items()] == [
        (key, id(value)) for key, value in before.items()
    ]


def _copy_tables(module: nn.Module) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
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


def torch_random_states() -> tuple[torch.Tensor, ...]:
    """Return the states of the generators of torch, of the host and of devices in use."""
    devices = (generator.get_state() for generator in _device_generators())
    return torch.get_rng_state(), *devices


def _device_generators() -> tuple[torch.Generator, ...]:
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped upstream
    return tuple(torch.cuda.default_generators) if is_in_use else ()
