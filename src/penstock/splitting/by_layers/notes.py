"""What stages tell one another of values that they do not send: who returned what, in outline.

Notes travel as one text, so that a steady shape costs a lookup. A call of a module is one entry:

    ["model.layers.3", 0, "*", ["T4x128x512 torch.float32"]]

its path, the how-manieth call it is, the tree that it returned and the tree's leaves: tensors in
outline, anything else as JSON. The model's inputs are the entry of the path "".
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from penstock.errors import ModelError
from penstock.splitting.by_layers.standin import stand_in

__all__ = [
    "INPUTS",
    "Entry",
    "Value",
    "describe",
    "describe_inputs",
    "read_notes",
    "rebuild",
    "write_notes",
]

INPUTS = ""
_ONE_TENSOR = "*"
_ONE_LEAF = ("",)


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of a module: path, number of the call, and outline of what it returned.

    `names` says where in the tree each leaf is; an input has the name of its parameter, however
    it was given.
    """

    path: str
    call: int
    tree: str
    leaves: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor that a call returned, by its place in the tree."""

    path: str
    call: int
    leaf: str


def describe(path: str, call: int, output: Any) -> tuple[Entry, list[tuple[Value, torch.Tensor]]]:
    """The outline of what a module returned, and the tensors in it."""
    if isinstance(output, torch.Tensor):
        entry = Entry(path, call, _ONE_TENSOR, (_outline(output),), _ONE_LEAF)
        return entry, [(Value(path, call, ""), output)]
    leaves, spec = tree_flatten(output)
    return _describe(path, call, leaves, spec, _leaf_names(spec))


def describe_inputs(
    parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Entry, list[tuple[Value, torch.Tensor]]]:
    """The outline of what a model gets; `parameters` are the names of its positional ones."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    return _describe(INPUTS, 0, leaves, spec, _input_names(spec, tuple(parameters)))


def _describe(
    path: str, call: int, leaves: Sequence[Any], spec: TreeSpec, names: tuple[str, ...]
) -> tuple[Entry, list[tuple[Value, torch.Tensor]]]:
    texts = tuple(_leaf_text(path, leaf) for leaf in leaves)
    tensors = [
        (Value(path, call, name), leaf)
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    return Entry(path, call, _write_spec(spec, path), texts, names), tensors


@lru_cache(maxsize=4096)
def _leaf_names(spec: TreeSpec) -> tuple[str, ...]:
    """Where in the tree each leaf is; its number, in a tree that does not say."""
    tree = tree_unflatten(range(spec.num_leaves), spec)
    try:
        return tuple(keystr(place) for place, _ in tree_flatten_with_path(tree)[0])
    except ValueError:
        return tuple(map(str, range(spec.num_leaves)))


@lru_cache(maxsize=4096)
def _input_names(spec: TreeSpec, parameters: tuple[str, ...]) -> tuple[str, ...]:
    """The names of inputs, from the tree of positional and keyword arguments."""
    args, kwargs = tree_unflatten(range(spec.num_leaves), spec)
    places = [*parameters, *map(str, range(len(parameters), len(args)))]
    named = [*zip(places, args, strict=False), *kwargs.items()]
    return tuple(
        f"{name}{leaf}" for name, tree in named for leaf in _leaf_names(tree_flatten(tree)[1])
    )


def rebuild(entry: Entry, values: dict[Value, torch.Tensor], device: torch.device) -> Any:
    """What a module on another stage returned: real where it was sent, else a stand-in."""
    leaves = [
        _rebuild_leaf(Value(entry.path, entry.call, name), text, values, device)
        for name, text in zip(entry.names, entry.leaves, strict=True)
    ]
    return leaves[0] if entry.tree == _ONE_TENSOR else tree_unflatten(leaves, _spec(entry.tree))


def _rebuild_leaf(
    value: Value, text: str, values: dict[Value, torch.Tensor], device: torch.device
) -> Any:
    if value in values:
        return values[value]
    if text.startswith("T"):
        shape, dtype = _read_outline(text)
        return stand_in(shape, dtype, device, value.path or "the model's inputs")
    return json.loads(text)


@lru_cache(maxsize=4096)
def write_notes(earlier: str, entries: tuple[Entry, ...], sent: tuple[Value, ...]) -> str:
    """The notes for the next stage: those of the stage before, what was added, what is sent."""
    known: list[Any] = json.loads(earlier)["entries"] if earlier else []
    added = [[e.path, e.call, e.tree, e.leaves, e.names] for e in entries]
    places = [[value.path, value.call, value.leaf] for value in sent]
    return json.dumps({"entries": known + added, "sent": places})


@lru_cache(maxsize=4096)
def read_notes(notes: str) -> tuple[dict[tuple[str, int], Entry], tuple[Value, ...]]:
    """The entries of notes by path and call, and which values came with them."""
    read = json.loads(notes)
    entries = [
        Entry(path, call, tree, tuple(leaves), tuple(names))
        for path, call, tree, leaves, names in read["entries"]
    ]
    return (
        {(entry.path, entry.call): entry for entry in entries},
        tuple(Value(*place) for place in read["sent"]),
    )


@lru_cache(maxsize=4096)
def _write_spec(spec: TreeSpec, path: str) -> str:
    try:
        return treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ModelError(
            f"{_who(path)} a tree that cannot be written down for another stage ({error}); use "
            "tensors, tuples, lists and dicts"
        ) from error


@lru_cache(maxsize=4096)
def _spec(text: str) -> TreeSpec:
    return treespec_loads(text)


@lru_cache(maxsize=4096)
def _outline_text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"T{'x'.join(map(str, shape))} {dtype}"


def _outline(tensor: torch.Tensor) -> str:
    return _outline_text(tensor.shape, tensor.dtype)


@lru_cache(maxsize=4096)
def _read_outline(text: str) -> tuple[Sequence[int], torch.dtype]:
    sizes, _, name = text[1:].partition(" ")
    dtype = getattr(torch, name.removeprefix("torch."))
    return [int(size) for size in sizes.split("x")] if sizes else [], dtype


def _leaf_text(path: str, leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _outline(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return json.dumps(leaf)
    raise ModelError(
        f"{_who(path)} a {type(leaf).__name__}, which cannot go to another stage; give tensors "
        "and plain values (for a cache of keys and values: use_cache=False)"
    )


def _who(path: str) -> str:
    return f"{path!r} returns" if path else "the model takes"
