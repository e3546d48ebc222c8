"""Trees of tensors and plain constants, taken apart into a structure and a list of tensors.

A structure is plain data: a tensor is "T", a constant ["c", value], a tuple, list or dict ["t" or
"l" or "d", children]. If tensors are distributed over a mesh, it is ["m", layouts, structure]
(see `parallel.dtensor`). It is sent between ranks as JSON, so nothing is ever unpickled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from penstock.errors import BoundaryError

__all__ = ["Structure", "count_tensors", "flatten", "map_tensors", "unflatten"]

Structure: TypeAlias = str | list[Any]


def flatten(tree: object) -> tuple[Structure, list[torch.Tensor]]:
    """Take a tree apart into its structure and its tensors, in order.

    Only plain data is sent between ranks: named tuples become tuples, mappings become dicts, and
    enums and other kinds of numbers and strings become plain numbers and strings.

    >>> flatten({"h": torch.ones(2), "n": 3})
    (['d', [['h', 'T'], ['n', ['c', 3]]]], [tensor([1., 1.])])
    """
    tensors: list[torch.Tensor] = []
    return _take_apart(tree, tensors), tensors


def _take_apart(node: object, tensors: list[torch.Tensor]) -> Structure:
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return "T"
    if isinstance(node, tuple):
        return ["t", [_take_apart(child, tensors) for child in node]]
    if isinstance(node, list):
        return ["l", [_take_apart(child, tensors) for child in node]]
    if isinstance(node, Mapping):
        return ["d", [[_key(key), _take_apart(child, tensors)] for key, child in node.items()]]
    return ["c", _constant(node)]


def _constant(value: object) -> bool | int | float | str | None:
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case _:
            raise BoundaryError(
                f"a value of type {type(value).__name__} cannot cross a stage boundary; pass "
                "tensors, numbers, strings, None, or tuples, lists and dicts of them"
            )


def _key(key: object) -> str | int:
    if not isinstance(key, str | int):
        raise BoundaryError(
            f"a dict that crosses a boundary must have str or int keys (got {key!r})"
        )
    return str.__str__(key) if isinstance(key, str) else key if type(key) is bool else int(key)


def unflatten(structure: Structure, tensors: Sequence[torch.Tensor]) -> Any:
    """Rebuild a tree from what `flatten` returned."""
    if structure == "T" and len(tensors) == 1:
        return tensors[0]
    rest = iter(tensors)
    tree = _put_together(structure, rest)
    if any(True for _ in rest):
        raise BoundaryError(
            f"a tree of {structure} must get as many tensors as it has (got {len(tensors)})"
        )
    return tree


def _put_together(node: Structure, rest: Iterator[torch.Tensor]) -> Any:
    match node:
        case "T":
            return _take_next(rest)
        case ["c", content]:
            return content
        case ["t", [*children]]:
            return tuple([_put_together(child, rest) for child in children])
        case ["l", [*children]]:
            return [_put_together(child, rest) for child in children]
        case ["d", [*pairs]]:
            return {key: _put_together(child, rest) for key, child in pairs}
        case _:
            raise BoundaryError(f"a tree structure cannot have the node {node!r}")


def _take_next(rest: Iterator[torch.Tensor]) -> torch.Tensor:
    for tensor in rest:
        return tensor
    raise BoundaryError("a tree must get as many tensors as its structure has (got fewer)")


def count_tensors(structure: object) -> int:
    """Return how many tensors a structure has; raise if it is not a valid structure."""
    match structure:
        case "T":
            return 1
        case ["c", None | bool() | int() | float() | str()]:
            return 0
        case ["t" | "l", [*children]]:
            return sum(count_tensors(child) for child in children)
        case ["d", [*pairs]]:
            return sum(count_tensors(_child_of(pair)) for pair in pairs)
        case ["m", [*layouts], inner] if count_tensors(inner) == len(layouts):
            return len(layouts)
        case _:
            raise BoundaryError(f"a tree structure cannot have the node {structure!r}")


def _child_of(pair: object) -> object:
    match pair:
        case [str() | int(), child]:
            return child
        case _:
            raise BoundaryError(f"a dict in a tree structure cannot have the item {pair!r}")


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: object) -> Any:
    """Return the tree with `function` applied to every tensor."""
    structure, tensors = flatten(tree)
    return unflatten(structure, [function(tensor) for tensor in tensors])
