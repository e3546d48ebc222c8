"""Graphs as plain data, which can be pickled and copied."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

# Registers an operation that graphs may have, also where a stage was only unpickled.
from penstock.splitting.by_tracing.capture import conditions as _conditions  # noqa: F401
from penstock.torch_private import HigherOrderOperator, OpOverload

__all__ = ["GraphData", "pack_graph", "unpack_graph"]

# The only metadata of a node that is kept: the line of the model that it comes from.
_KEPT = "stack_trace"


@dataclass(frozen=True, slots=True)
class _Reference:
    """A node, by its position in the graph."""

    position: int


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation of torch, by the path to it below `torch.ops`."""

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _NodeData:
    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    origin: str | None


@dataclass(frozen=True, slots=True)
class GraphData:
    """A graph without anything in it that belongs to one process."""

    nodes: tuple[_NodeData, ...]


def pack_graph(graph: fx.Graph) -> GraphData:
    """Return a graph as data."""
    positions = {node: _Reference(position) for position, node in enumerate(graph.nodes)}
    return GraphData(
        tuple(
            _NodeData(
                node.op,
                node.name,
                _pack_target(node.target),
                _map(node.args, positions),
                _map(node.kwargs, positions),
                node.meta.get(_KEPT),
            )
            for node in graph.nodes
        )
    )


def unpack_graph(data: GraphData) -> fx.Graph:
    """Return the graph that `pack_graph` made into data."""
    graph = fx.Graph()
    nodes: dict[_Reference, fx.Node] = {}
    for position, one in enumerate(data.nodes):
        args, kwargs = _map(one.args, nodes), _map(one.kwargs, nodes)
        node = graph.create_node(one.op, _unpack_target(one.target), args, kwargs, name=one.name)
        if one.origin is not None:
            node.meta[_KEPT] = one.origin
        nodes[_Reference(position)] = node
    return graph


def _map(value: Any, replace: dict[Any, Any]) -> Any:
    match value:
        case fx.Node() | _Reference():
            return replace[value]
        case tuple():
            return tuple(_map(item, replace) for item in value)
        case list():
            return [_map(item, replace) for item in value]
        case dict():
            return {key: _map(item, replace) for key, item in value.items()}
        case slice():
            return slice(*(_map(x, replace) for x in (value.start, value.stop, value.step)))
        case _:
            return value


def _pack_target(target: Any) -> Any:
    match target:
        case OpOverload():
            namespace, _, name = target._schema.name.partition("::")
            return _Operation((namespace, name, target._overloadname))
        case HigherOrderOperator():
            return _Operation(("higher_order", target.__name__))
        case _:
            return target


def _unpack_target(target: Any) -> Any:
    if isinstance(target, _Operation):
        return reduce(getattr, target.path, torch.ops)
    return target
