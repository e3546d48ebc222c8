"""Graphs: how stages are called in that of their pipe, and small changes in place."""

from typing import Any

import torch
from torch import fx, nn

__all__ = [
    "PP_SUBMOD_PREFIX",
    "_modify_graph_op_device",
    "_move_placeholders_to_front",
    "_recursive_getattr_with_parent",
    "get_submod_name",
]

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """Return the name of a stage in the graph of its pipe.

    >>> get_submod_name(2)
    'submod_pp_2'
    """
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


def _move_placeholders_to_front(graph: fx.Graph) -> None:
    """Put a graph's inputs before everything else, with all orders kept."""
    inputs = list(graph.find_nodes(op="placeholder", sort=True))
    first = next(iter(graph.nodes))
    for node in inputs:
        if first is node:
            first = node.next
        else:
            first.prepend(node)


def _modify_graph_op_device(gm: fx.GraphModule, new_device: torch.device) -> None:
    """Let every operation that makes a tensor make it on a device, in nested graphs too.

    Stages of a pipe need no such thing: they see to it when they are moved.
    """
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
