"""Records of calls: what modules of other stages returned, and what their hooks got.

A stage that does not hold a module needs to know what a call of it returned. A record has the tree
of the output and its leaves as text: the shape and dtype of tensors, and JSON for anything else.
The values of tensors are sent separately, to those stages that need them.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.records.shared_containers import Returned
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
    "CallRecord",
    "HookRecord",
    "Value",
    "describe",
    "describe_hook_call",
    "describe_inputs",
    "hook_path",
    "parameter_names",
    "rebuild",
    "rebuild_hook_call",
]

INPUTS = ""
_ONE_TENSOR = "*"
_ONE_LEAF = ("",)
# Begins the tree of a call that wrote to its arguments.
_WRITES = "+"
_OPAQUE = "?"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a module: its path, the number of the call, and the form of what it returned.

    The tree of a call that wrote to its arguments has these entries beside the output. `names`
    has the position of each leaf in the tree; an input has the name of its parameter.
    """

    path: str
    call: int
    tree: str
    leaves: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """The name of one tensor that a call returned: the call, and the position in its output."""

    path: str
    call: int
    leaf: str


@dataclass(frozen=True, slots=True)
class HookRecord:
    """One call of a module inside of a unit, with the arguments and the output that its hooks get.

    `values` names each leaf. A tensor that is returned or sent anyway has the name under which it
    is sent. A leaf that cannot be sent is opaque.
    """

    unit: str
    call: int
    module: str
    tree: str
    leaves: tuple[str, ...]
    values: tuple[Value, ...]


def hook_path(module: str) -> str:
    """Return the path for values that only hooks of a module get."""
    return f"hooks of {module}"


def describe(
    path: str, call: int, output: Any
) -> tuple[CallRecord, list[tuple[Value, torch.Tensor]]]:
    """Return the record of what a module returned, and the tensors in it."""
    if isinstance(output, Returned):
        if output.entries:
            leaves, spec = tree_flatten((output.output, output.entries))
            record, tensors = _describe(path, call, leaves, spec, _leaf_names(spec))
            return replace(record, tree=_WRITES + record.tree), tensors
        output = output.output
    if isinstance(output, torch.Tensor):
        record = CallRecord(path, call, _ONE_TENSOR, (_tensor_text(output),), _ONE_LEAF)
        return record, [(Value(path, call, ""), output)]
    leaves, spec = tree_flatten(output)
    return _describe(path, call, leaves, spec, _leaf_names(spec))


def parameter_names(model: nn.Module) -> list[str]:
    """Return the names of a model's positional parameters, by which its inputs are known."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def describe_inputs(
    parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[CallRecord, list[tuple[Value, torch.Tensor]]]:
    """Return the record of a model's inputs; `parameters` names the positional ones."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    return _describe(INPUTS, 0, leaves, spec, _input_names(spec, tuple(parameters)))


def describe_hook_call(
    unit: tuple[str, int], module: str, number: int, seen: Any, known: Mapping[int, Value]
) -> tuple[HookRecord, list[tuple[Value, torch.Tensor]]]:
    """Return the record of what hooks of a module get, and the tensors that have no other name.

    `known` names the tensors that other stages get anyway, by their identity; `number` is the
    number of the module's call.
    """
    leaves, spec = tree_flatten(seen)
    try:
        tree = treespec_dumps(spec)
    except (NotImplementedError, TypeError):
        leaves, spec = [_Opaque(type(seen).__name__)] * 3, tree_flatten((0, 0, 0))[1]
        tree = treespec_dumps(spec)
    own = [Value(hook_path(module), number, str(index)) for index in range(len(leaves))]
    values = tuple(known.get(id(leaf), value) for leaf, value in zip(leaves, own, strict=True))
    tensors = [
        (value, leaf)
        for leaf, value in zip(leaves, values, strict=True)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known
    ]
    texts = tuple(map(_hook_leaf_text, leaves))
    return HookRecord(*unit, module, tree, texts, values), tensors


def _describe(
    path: str, call: int, leaves: Sequence[Any], spec: TreeSpec, names: tuple[str, ...]
) -> tuple[CallRecord, list[tuple[Value, torch.Tensor]]]:
    texts = tuple(_leaf_text(path, leaf) for leaf in leaves)
    tensors = [
        (Value(path, call, name), leaf)
        for name, leaf in zip(names, leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    return CallRecord(path, call, _write_spec(spec, path), texts, names), tensors


@lru_cache(maxsize=4096)
def _leaf_names(spec: TreeSpec) -> tuple[str, ...]:
    """Return the position of each leaf in the tree; its number, if the tree has no names."""
    tree = tree_unflatten(range(spec.num_leaves), spec)
    try:
        return tuple(keystr(place) for place, _ in tree_flatten_with_path(tree)[0])
    except ValueError:
        return tuple(map(str, range(spec.num_leaves)))


@lru_cache(maxsize=4096)
def _input_names(spec: TreeSpec, parameters: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of inputs, from the tree of positional and keyword arguments."""
    args, kwargs = tree_unflatten(range(spec.num_leaves), spec)
    places = [*parameters, *map(str, range(len(parameters), len(args)))]
    named = [*zip(places, args, strict=False), *kwargs.items()]
    return tuple(
        f"{name}{leaf}" for name, tree in named for leaf in _leaf_names(tree_flatten(tree)[1])
    )


def rebuild(record: CallRecord, values: dict[Value, torch.Tensor], device: torch.device) -> Any:
    """Return what a module on another stage returned, with stand-ins for what was not sent.

    It is a `Returned` if the call wrote to its arguments too.
    """
    source = record.path or "the model's inputs"
    leaves = [
        _rebuild_leaf(Value(record.path, record.call, name), text, values, device, source)
        for name, text in zip(record.names, record.leaves, strict=True)
    ]
    if record.tree == _ONE_TENSOR:
        return leaves[0]
    tree = tree_unflatten(leaves, _spec(record.tree.removeprefix(_WRITES)))
    return Returned(*tree) if record.tree.startswith(_WRITES) else tree


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
        shape, dtype = _read_tensor_text(text)
        return stand_in(shape, dtype, device, source)
    return json.loads(text)


def rebuild_hook_call(
    record: HookRecord, values: dict[Value, torch.Tensor], device: torch.device
) -> Any:
    """Return what hooks of a module on another stage get, with stand-ins for what was not sent."""
    leaves = [
        Absent(text[1:], record.module)
        if text.startswith(_OPAQUE)
        else _rebuild_leaf(value, text, values, device, record.module)
        for text, value in zip(record.leaves, record.values, strict=True)
    ]
    return tree_unflatten(leaves, _spec(record.tree))


@lru_cache(maxsize=4096)
def _write_spec(spec: TreeSpec, path: str) -> str:
    try:
        return treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ModelError(
            f"{_who(path)} a tree that cannot be sent to another stage ({error}); use tensors, "
            "tuples, lists and dicts"
        ) from error


@lru_cache(maxsize=4096)
def _spec(text: str) -> TreeSpec:
    return treespec_loads(text)


@lru_cache(maxsize=4096)
def _write_tensor_text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"T{'x'.join(map(str, shape))} {dtype}"


def _tensor_text(tensor: torch.Tensor) -> str:
    return _write_tensor_text(tensor.shape, tensor.dtype)


@lru_cache(maxsize=4096)
def _read_tensor_text(text: str) -> tuple[Sequence[int], torch.dtype]:
    sizes, _, name = text[1:].partition(" ")
    dtype = getattr(torch, name.removeprefix("torch."))
    return [int(size) for size in sizes.split("x")] if sizes else [], dtype


@dataclass(frozen=True, slots=True)
class _Opaque:
    """A value that is not a tree of plain data."""

    kind: str


def _hook_leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _tensor_text(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return json.dumps(leaf)
    return f"{_OPAQUE}{leaf.kind if isinstance(leaf, _Opaque) else type(leaf).__name__}"


def _leaf_text(path: str, leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _tensor_text(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return json.dumps(leaf)
    raise ModelError(
        f"{_who(path)} a {type(leaf).__name__}, which cannot be sent to another stage; use "
        "tensors and plain values (to have no cache of keys and values: use_cache=False)"
    )


def _who(path: str) -> str:
    return f"{path!r} returns" if path else "the model takes"
