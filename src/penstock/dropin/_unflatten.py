"""Gives a flat graph the modules back that its operations come from."""

import operator
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import fx

__all__ = ["_outline_submodules"]


def _outline_submodules(orig_graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module with one for each module it was traced through; again is `name@1`."""
    held = {}
    owner = orig_graph.owning_module
    for node in orig_graph.find_nodes(op="get_attr"):
        if owner is not None:
            held[str(node.target)] = operator.attrgetter(str(node.target))(owner)
    builder = _Level(0)
    builder.fill(list(orig_graph.nodes))
    builder.graph.lint()
    return fx.GraphModule({**builder.modules, **held}, builder.graph)


class _Level:
    """One module of the nest: its graph, its children, and its node for each of the flat graph."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.graph = fx.Graph()
        self.modules: dict[str, fx.GraphModule] = {}
        self.made: dict[fx.Node, fx.Node] = {}

    def fill(self, nodes: Sequence[fx.Node]) -> None:
        """Copy nodes that are this module's own, and call children for the others."""
        for name, run in groupby(nodes, lambda node: _child(node, self.depth)):
            if name is None:
                for node in run:
                    self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
            else:
                self._call(name, list(run))

    def _call(self, name: str, nodes: list[fx.Node]) -> None:
        inside = set(nodes)
        inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes))
        inputs = [node for node in inputs if node not in inside]
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        again = sum(known.partition("@")[0] == name for known in self.modules)
        target = f"{name}@{again}" if again else name
        self.modules[target] = _make_child(self.depth + 1, nodes, inputs, outputs)
        call = self.graph.call_module(target, tuple(self.made[node] for node in inputs))
        for number, node in enumerate(outputs):
            is_alone = len(outputs) == 1
            item = call if is_alone else self.graph.call_function(operator.getitem, (call, number))
            item.meta = dict(node.meta)
            self.made[node] = item


def _make_child(
    depth: int, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]
) -> fx.GraphModule:
    child = _Level(depth)
    for node in inputs:
        child.made[node] = child.graph.placeholder(node.name)
        child.made[node].meta = dict(node.meta)
    child.fill(nodes)
    made: list[Any] = [child.made[node] for node in outputs]
    child.graph.output(made[0] if len(made) == 1 else tuple(made))
    return fx.GraphModule({**child.modules}, child.graph)


def _child(node: fx.Node, depth: int) -> str | None:
    """Return the child that a node belongs to, or None for a node of the module itself."""
    if node.op in ("placeholder", "get_attr", "output"):
        return None
    stack = (node.meta.get("nn_module_stack") or {}).values()
    paths = ([atom for atom in str(path).split(".") if atom] for path, *_ in stack)
    path = max(paths, key=len, default=[])
    return path[depth] if len(path) > depth else None
