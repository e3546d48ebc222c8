"""Which nodes of a traced graph draw random numbers, and a graph that tells of each of them."""

from collections.abc import Callable

import torch
from torch import fx

from penstock.splitting.by_tracing.stage.graph_data import pack_graph, unpack_graph
from penstock.torch_private import HigherOrderOperator

__all__ = ["announce_random_nodes", "is_random"]


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or may do so in a graph that is nested in it."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def announce_random_nodes(
    graph: fx.Graph, enter: Callable[[str], None], leave: Callable[[str], None]
) -> fx.Graph:
    """A copy of a graph that calls `enter` before each random node and `leave` after it.

    They get the node's name, which it has from the trace of the whole model, however it is cut.
    """
    told = unpack_graph(pack_graph(graph))
    for node in [node for node in told.nodes if is_random(node)]:
        with told.inserting_before(node):
            told.call_function(enter, (node.name,))
        with told.inserting_after(node):
            told.call_function(leave, (node.name,))
    return told
