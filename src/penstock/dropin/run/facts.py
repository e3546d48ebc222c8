"""What all ranks must know of a step before it begins: the form of what each was given."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.torch_private import tree_flatten

__all__ = ["count_rows", "describe_calls", "describe_module"]


def describe_calls(arg_mbs: Sequence[Any], kwarg_mbs: Sequence[Mapping[str, Any]]) -> str:
    """Say what decides the shapes that a step gives: tensors without content, plain values."""
    args = [_describe_all(args) for args in arg_mbs]
    kwargs = [[(name, _describe(value)) for name, value in k.items()] for k in kwarg_mbs]
    return f"{args}{kwargs}"


def _describe_all(items: Iterable[Any]) -> list[str]:
    return [_describe(item) for item in items]


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list | dict):
        leaves, structure = tree_flatten(value)
        return f"{structure}{_describe_all(leaves)}"
    match value:
        case DTensor():
            return f"{value.shape}{value.dtype}{value.requires_grad}{value.placements}"
        case torch.Tensor():
            return f"{value.shape}{value.dtype}{value.requires_grad}"
        case None | bool() | int() | float() | str():
            return repr(value)
        case _:
            return type(value).__name__


def describe_module(module: nn.Module) -> str:
    """Say what decides which of a module's outputs ask for gradients."""
    trained = bytes(parameter.requires_grad for parameter in module.parameters())
    return f"{module.training}{trained!r}"


def count_rows(arg_mbs: Sequence[Any], spec: tuple[Any, ...] | None) -> int | None:
    """Return how many rows the first tensor that is split has in all microbatches together."""
    dims = None if spec is None else [getattr(s, "split_dim", None) for s in tree_flatten(spec)[0]]
    total = 0
    for args in arg_mbs:
        leaves = tree_flatten(tuple(args))[0]
        splits = [0] * len(leaves) if dims is None else dims
        sizes = [
            leaf.shape[dim]
            for leaf, dim in zip(leaves, splits, strict=False)
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and dim is not None
        ]
        if not sizes:
            return None
        total += sizes[0]
    return total
