"""Graphs: how stages are called in that of their pipe, small changes in place, and as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import ArgumentError
from penstock.splitting.by_tracing.stage.graph_data import pack_graph, unpack_graph

__all__ = [
    "PP_SUBMOD_PREFIX",
    "_LinearNodeList",
    "_NodeReference",
    "_direct_serialization_deserialize",
    "_direct_serialization_reduce",
    "_modify_graph_op_device",
    "_move_placeholders_to_front",
    "_recursive_getattr_with_parent",
    "get_submod_name",
]

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """Return the name of a stage in the graph of its pipe."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


def _move_placeholders_to_front(graph: fx.Graph) -> None:
    """Put a graph's inputs before everything else, with all orders kept."""
    last = next(iter(graph.nodes)).prev
    for node in list(graph.find_nodes(op="placeholder", sort=True)):
        last.append(node)
        last = node


def _modify_graph_op_device(gm: fx.GraphModule, new_device: torch.device) -> None:
    """Let every operation that makes a tensor make it on a device, in nested graphs too."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and "device" in node.kwargs:
                    node.update_kwarg("device", new_device)
            module.recompile()


def _recursive_getattr_with_parent(mod: nn.Module, fqn: str) -> tuple[nn.Module | None, Any]:
    """Return the module that a dotted name leads into and the attribute; None where missing."""
    *path, last = fqn.split(".")
    parent: Any = mod
    for atom in path:
        parent = getattr(parent, atom, None)
        if parent is None:
            return None, None
    return parent, getattr(parent, last, None)


@dataclass(frozen=True, slots=True)
class _NodeReference:
    """A node, by its name."""

    name: str


class _LinearNodeList:
    """All nodes of a graph in their order, as data that belongs to no graph and no process."""

    def __init__(self, node_list: Iterable[fx.Node]) -> None:
        nodes = list(node_list)
        if not nodes or nodes != list(nodes[0].graph.nodes):
            raise ArgumentError("a list of nodes is that of a whole graph; give `graph.nodes`")
        self.serialize_node_list = [_NodeReference(node.name) for node in nodes]
        self._data = pack_graph(nodes[0].graph)

    def to_graph(self) -> fx.Graph:
        return unpack_graph(self._data)


def _direct_serialization_deserialize(body: dict[str, Any], nodes: _LinearNodeList) -> nn.Module:
    holder = nn.Module()
    holder.__dict__.update(body)
    return fx.GraphModule(holder, nodes.to_graph())


def _direct_serialization_reduce(self: fx.GraphModule) -> tuple[Any, ...]:
    body = {name: value for name, value in self.__dict__.items() if name != "_graph"}
    return _direct_serialization_deserialize, (body, _LinearNodeList(self.graph.nodes))
