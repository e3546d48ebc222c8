"""Signatures of modules: names, shapes and dtypes of their tensors, and which are trained."""

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Signature", "sign"]

# Name and description of every parameter and buffer, in the module's order.
Signature: TypeAlias = tuple[tuple[str, str], ...]


def sign(module: nn.Module) -> Signature:
    """Return the signature of a module, which depends neither on its device nor on its values.

    >>> sign(nn.Linear(3, 2, bias=False))
    (('weight', 'float32 [2, 3]'),)
    """
    return tuple(_describe(module))


def _describe(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, _describe_tensor(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, f"{_describe_tensor(buffer)}, buffer"


def _describe_tensor(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return f"{dtype} without a shape"
    return f"{dtype} {list(tensor.shape)}"
