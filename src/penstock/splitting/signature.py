"""What a module holds, told without its values: names, shapes, dtypes, and what is trained."""

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Signature", "sign"]

# Name and description of every parameter and buffer, in the module's order.
Signature: TypeAlias = tuple[tuple[str, str], ...]


def sign(module: nn.Module) -> Signature:
    """The signature of a module; where it lies and what its values are makes no difference.

    >>> sign(nn.Linear(3, 2, bias=False))
    (('weight', 'float32 [2, 3]'),)
    """
    return tuple(_describe(module))


def _describe(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, _outline(parameter) + ("" if parameter.requires_grad else ", frozen")
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, f"{_outline(buffer)}, buffer"


def _outline(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        return f"{dtype} of no shape yet"
    return f"{dtype} {list(tensor.shape)}"
