"""What a model returns for each microbatch, put together as what it returns for the batch.

Outputs stay on the rank that made them, so that they keep their classes: dataclasses, named
tuples, mappings of any kind. The loss of a microbatch is its share of the batch's.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from penstock.errors import BoundaryError
from penstock.loss.weigher import Share

__all__ = ["KeptOutput", "fill", "keep_output", "outline", "tensors_of"]

# How to get something like a node from other children: the names of these, themselves, and a way.
_Parts = tuple[list[Any], list[Any], Callable[[list[Any]], Any]]


@dataclass(frozen=True, slots=True, eq=False)
class KeptOutput:
    """The output of one microbatch, cut off from its graph.

    `losses` has the numbers of the tensors in it that are losses of the microbatch, and `weight`
    is what they count for in those of the batch.
    """

    value: Any
    losses: frozenset[int]
    weight: float


def keep_output(output: Any, loss: object, share: Share) -> KeptOutput:
    """Keep the output of a microbatch, whose loss may be one of the tensors in it.

    So are single numbers that the model calls `loss`, or something that ends in `_loss`. `share`
    is what the loss counts for in that of the batch.
    """
    found = list(_find_tensors(output, ""))
    losses = frozenset(
        number
        for number, (name, tensor) in enumerate(found)
        if tensor is loss or (_is_called_loss(name) and not tensor.dim())
    )
    values = [
        _with_parts(tensor.detach(), share) if tensor is loss else tensor.detach()
        for _, tensor in found
    ]
    return KeptOutput(fill(output, values), losses, share.weight)


def _with_parts(loss: torch.Tensor, share: Share) -> torch.Tensor:
    """The number that the share's weight makes the whole of what a loss counts for."""
    for part in share.parts if share.weight else ():
        loss = loss + part.value.detach() * (part.weight / share.weight)
    return loss


def _is_called_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors in an output, in order."""
    return [tensor for _, tensor in _find_tensors(output, "")]


def _find_tensors(node: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield name, node
    elif (parts := _take_apart(node)) is not None:
        for key, child in zip(parts[0], parts[1], strict=True):
            yield from _find_tensors(child, key if isinstance(key, str) else "")


def outline(node: Any) -> Any:
    """Everything in an output but the values of its tensors, as JSON has it."""
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
    """An output like this one with these tensors in the place of its own."""
    return _fill(node, iter(tensors))


def _fill(node: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        return next(tensors)
    parts = _take_apart(node)
    if parts is None:
        return _constant(node)
    return parts[2]([_fill(child, tensors) for child in parts[1]])


def _take_apart(node: Any) -> _Parts | None:
    """The children of a node and how to make one like it; nothing, for a constant."""
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
    """A dataclass with other values, without what its constructor would make of them."""
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
