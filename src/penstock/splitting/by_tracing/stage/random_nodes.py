"""Nodes of a traced graph that draw random numbers, and a graph that announces each of them."""

from collections.abc import Callable

import torch
from torch import fx

from penstock.splitting.by_tracing.stage.graph_data import pack_graph, unpack_graph
from penstock.torch_private import HigherOrderOperator

__all__ = ["announce_random_nodes", "is_random"]


def is_random(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, or may do so in a nested graph."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def announce_random_nodes(
    graph: fx.Graph, enter: Callable[[str], None], leave: Callable[[str], None]
) -> fx.Graph:
    """Return a copy of a graph that calls `enter` before each random node and `leave` after it.

    They get the node's name in the trace of the whole model, which does not depend on the cut.
    """
    announced = unpack_graph(pack_graph(graph))
    for node in [node for node in announced.nodes if is_random(node)]:
        with announced.inserting_before(node):
            announced.call_function(enter, (node.name,))
        with announced.inserting_after(node):
            announced.call_function(leave, (node.name,))
    return announced
