"""What stages tell one another of values that they do not send: who returned what, in outline.

Notes travel as one text, so that a steady shape costs a lookup. A call of a module is one entry:

    ["model.layers.3", 0, "*", ["T4x128x512 torch.float32"]]

its path, the how-manieth call it is, the tree that it returned and the tree's leaves: tensors in
outline, anything else as JSON. The model's inputs are the entry of the path "". A call inside of a
module that hooks look at is a side of the module's entry; see `Side`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.splitting.by_layers.stand_ins import Absent, stand_in
from penstock.torch_private import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

__all__ = [
    "INPUTS",
    "Note",
    "Side",
    "Value",
    "describe",
    "describe_inputs",
    "describe_side",
    "read_notes",
    "read_sides",
    "rebuild",
    "rebuild_side",
    "side_path",
    "write_notes",
]

INPUTS = ""
_ONE_TENSOR = "*"
_ONE_LEAF = ("",)
_OPAQUE = "?"


@dataclass(frozen=True, slots=True)
class Note:
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


@dataclass(frozen=True, slots=True)
class Side:
    """What hooks inside of a call of a unit see: the arguments and the output of one module.

    `values` says where each leaf is to be had: what is returned or sent as another value is that
    value, anything else is a value of its own. What can only be had where it is made is opaque.
    """

    unit: str
    call: int
    module: str
    tree: str
    leaves: tuple[str, ...]
    values: tuple[Value, ...]


def side_path(module: str) -> str:
    """The path of the values that hooks of a module see, which are not what it returns."""
    return f"hooks of {module}"


def describe(path: str, call: int, output: Any) -> tuple[Note, list[tuple[Value, torch.Tensor]]]:
    """The outline of what a module returned, and the tensors in it."""
    if isinstance(output, torch.Tensor):
        entry = Note(path, call, _ONE_TENSOR, (_outline(output),), _ONE_LEAF)
        return entry, [(Value(path, call, ""), output)]
    leaves, spec = tree_flatten(output)
    return _describe(path, call, leaves, spec, _leaf_names(spec))


def describe_inputs(
    parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Note, list[tuple[Value, torch.Tensor]]]:
    """The outline of what a model gets; `parameters` are the names of its positional ones."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    return _describe(INPUTS, 0, leaves, spec, _input_names(spec, tuple(parameters)))


def describe_side(
    unit: tuple[str, int], module: str, number: int, seen: Any, known: Mapping[int, Value]
) -> tuple[Side, list[tuple[Value, torch.Tensor]]]:
    """The outline of what hooks of a module see, and the tensors that have no other name.

    `known` has values that other stages have anyway, by the identity of their tensors; `number`
    is the number of the module's call.
    """
    leaves, spec = tree_flatten(seen)
    try:
        tree = treespec_dumps(spec)
    except (NotImplementedError, TypeError):
        leaves, spec = [_Opaque(type(seen).__name__)] * 3, tree_flatten((0, 0, 0))[1]
        tree = treespec_dumps(spec)
    own = [Value(side_path(module), number, str(index)) for index in range(len(leaves))]
    values = tuple(known.get(id(leaf), value) for leaf, value in zip(leaves, own, strict=True))
    tensors = [
        (value, leaf)
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known
    ]
    texts = tuple(map(_side_text, leaves))
    return Side(*unit, module, tree, texts, values), tensors


def _describe(
    path: str, call: int, leaves: Sequence[Any], spec: TreeSpec, names: tuple[str, ...]
) -> tuple[Note, list[tuple[Value, torch.Tensor]]]:
    texts = tuple(_leaf_text(path, leaf) for leaf in leaves)
    tensors = [
        (Value(path, call, name), leaf)
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    return Note(path, call, _write_spec(spec, path), texts, names), tensors


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


def rebuild(entry: Note, values: dict[Value, torch.Tensor], device: torch.device) -> Any:
    """What a module on another stage returned: real where it was sent, else a stand-in."""
    source = entry.path or "the model's inputs"
    leaves = [
        _rebuild_leaf(Value(entry.path, entry.call, name), text, values, device, source)
        for name, text in zip(entry.names, entry.leaves, strict=True)
    ]
    return leaves[0] if entry.tree == _ONE_TENSOR else tree_unflatten(leaves, _spec(entry.tree))


def _rebuild_leaf(
    value: Value,
    text: str,
    values: dict[Value, torch.Tensor],
    device: torch.device,
    source: str,
) -> Any:
    if value in values:
        return values[value]
    if text.startswith("T"):
        shape, dtype = _read_outline(text)
        return stand_in(shape, dtype, device, source)
    return json.loads(text)


def rebuild_side(side: Side, values: dict[Value, torch.Tensor], device: torch.device) -> Any:
    """What hooks of a module on another stage see: real where it was sent, else a stand-in."""
    leaves = [
        Absent(text[1:], side.module)
        if text.startswith(_OPAQUE)
        else _rebuild_leaf(value, text, values, device, side.module)
        for text, value in zip(side.leaves, side.values, strict=True)
    ]
    return tree_unflatten(leaves, _spec(side.tree))


@lru_cache(maxsize=4096)
def write_notes(
    earlier: str,
    entries: tuple[Note, ...],
    sent: tuple[Value, ...],
    sides: tuple[Side, ...] = (),
    changed: tuple[tuple[str, tuple[str, ...]], ...] = (),
) -> str:
    """The notes for the next stage: those of the stage before, what was added, what is sent.

    `changed` has attributes of units that their calls change, all that are known.
    """
    known = json.loads(earlier) if earlier else {"entries": [], "sides": []}
    added = [[e.path, e.call, e.tree, e.leaves, e.names] for e in entries]
    aside = [
        [s.unit, s.call, s.module, s.tree, s.leaves, [_place(value) for value in s.values]]
        for s in sides
    ]
    return json.dumps(
        {
            "entries": known["entries"] + added,
            "sides": known["sides"] + aside,
            "sent": [_place(value) for value in sent],
            "changed": dict(changed),
        }
    )


def _place(value: Value) -> list[str | int]:
    return [value.path, value.call, value.leaf]


@lru_cache(maxsize=4096)
def read_notes(
    notes: str,
) -> tuple[dict[tuple[str, int], Note], tuple[Value, ...], dict[str, tuple[str, ...]]]:
    """The entries of notes by path and call, which values came with them, and what changed."""
    read = json.loads(notes)
    entries = [
        Note(path, call, tree, tuple(leaves), tuple(names))
        for path, call, tree, leaves, names in read["entries"]
    ]
    return (
        {(entry.path, entry.call): entry for entry in entries},
        tuple(Value(*place) for place in read["sent"]),
        {path: tuple(names) for path, names in read["changed"].items()},
    )


@lru_cache(maxsize=4096)
def read_sides(notes: str) -> dict[tuple[str, int], tuple[Side, ...]]:
    """The sides of notes, in order, by the path and call of the unit."""
    found: dict[tuple[str, int], tuple[Side, ...]] = {}
    for unit, call, module, tree, leaves, places in json.loads(notes)["sides"]:
        values = tuple(Value(*place) for place in places)
        side = Side(unit, call, module, tree, tuple(leaves), values)
        found[unit, call] = (*found.get((unit, call), ()), side)
    return found


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


@dataclass(frozen=True, slots=True)
class _Opaque:
    """Stands for something that is not a tree of plain things."""

    kind: str


def _side_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _outline(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return json.dumps(leaf)
    return f"{_OPAQUE}{leaf.kind if isinstance(leaf, _Opaque) else type(leaf).__name__}"


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
