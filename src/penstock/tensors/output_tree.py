"""Outputs of any class as trees of tensors: dataclasses, named tuples, mappings of any kind."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.errors import BoundaryError

__all__ = ["fill", "find_tensors", "outline", "tensors_of"]

# How to get something like a node from other children: the names of these, themselves, and a way.
_Parts = tuple[list[Any], list[Any], Callable[[list[Any]], Any]]


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors in an output, in order."""
    return [tensor for _, tensor in find_tensors(output)]


def find_tensors(node: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an output, in order, each with the name that it has there."""
    if isinstance(node, torch.Tensor):
        yield name, node
    elif (parts := _take_apart(node)) is not None:
        for key, child in zip(parts[0], parts[1], strict=True):
            yield from find_tensors(child, key if isinstance(key, str) else "")


def outline(node: Any) -> Any:
    """Return everything in an output except the values of its tensors, as JSON values."""
    if isinstance(node, torch.Tensor):
        return "T"
    parts = _take_apart(node)
    if parts is None:
        return ["c", _constant(node)]
    keys, children, _ = parts
    if isinstance(node, tuple | list) and not hasattr(node, "_fields"):
        return ["t" if isinstance(node, tuple) else "l", [outline(child) for child in children]]
    return ["d", [[key, outline(child)] for key, child in zip(keys, children, strict=True)]]


def _constant(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BoundaryError(
        f"the model's output has a {type(value).__name__}, of which microbatches cannot be put "
        "together; return tensors, numbers, strings and None, in tuples, lists, dicts, named "
        "tuples and dataclasses"
    )


def fill(node: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return an output like this one, with these tensors in place of its own."""
    return _fill(node, iter(tensors))


def _fill(node: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return next(tensors)
    parts = _take_apart(node)
    if parts is None:
        return _constant(node)
    return parts[2]([_fill(child, tensors) for child in parts[1]])


def _take_apart(node: Any) -> _Parts | None:
    """Return the children of a node and how to make one like it, or None for a constant."""
    match node:
        case tuple() if hasattr(node, "_make") and hasattr(node, "_fields"):
            return list(node._fields), list(node), node._make
        case tuple() | list():
            return list(range(len(node))), list(node), type(node)
        case _ if is_dataclass(node) and not isinstance(node, type):
            names = [field.name for field in fields(node)]
            return names, [getattr(node, n) for n in names], lambda new: _replace(node, names, new)
        case Mapping():
            keys = list(node)
            return keys, [node[key] for key in keys], lambda new: _remap(node, keys, new)
        case _:
            return None


def _replace(node: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    """Return a dataclass with other values, without calling its constructor."""
    made = copy(node)
    for name, value in zip(names, values, strict=True):
        try:
            setattr(made, name, value)
        except AttributeError:  # it is frozen
            object.__setattr__(made, name, value)
    return made


def _remap(node: Mapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> Any:
    made = copy(node) if isinstance(node, MutableMapping) else dict(node)
    for key, value in zip(keys, values, strict=True):
        made[key] = value
    return made
