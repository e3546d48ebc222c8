"""Graph modules as data: pickled without being traced again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from penstock.errors import ArgumentError
from penstock.splitting.by_tracing.stage.graph_data import pack_graph, unpack_graph

__all__ = [
    "_LinearNodeList",
    "_NodeReference",
    "_direct_serialization_deserialize",
    "_direct_serialization_reduce",
]


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
        """Return a new graph with these nodes."""
        return unpack_graph(self._data)


def _direct_serialization_deserialize(body: dict[str, Any], nodes: _LinearNodeList) -> nn.Module:
    """Return the graph module with these attributes and nodes."""
    holder = nn.Module()
    holder.__dict__.update(body)
    return fx.GraphModule(holder, nodes.to_graph())


def _direct_serialization_reduce(self: fx.GraphModule) -> tuple[Any, ...]:
    """Reduce a graph module for pickling: its attributes, and its nodes."""
    body = {name: value for name, value in self.__dict__.items() if name != "_graph"}
    return _direct_serialization_deserialize, (body, _LinearNodeList(self.graph.nodes))
