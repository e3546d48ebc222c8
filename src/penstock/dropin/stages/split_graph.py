"""Where a recorded graph can be cut, so that weight gradients are made after input gradients.

    output -- n1 -- n2 -- input        n1, n2: nodes on the way to an input
              |     |                  the cut: their edges to what leads to weights only
              w1    w2

The gradient that arrives at such a node serves both ways. So the first half notes it, and the
second half continues from there. Nodes that lead to a common weight form one group: their part of
the graph is run in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import Node

__all__ = [
    "Group",
    "construct_reverse_graph",
    "find_groups",
    "get_param_groups",
    "reverse_closure",
]


@dataclass(slots=True)
class Group:
    """Weights, and the nodes from which all of their gradients come."""

    weights: set[Node]
    nodes: list[Node]


def find_groups(
    roots: Sequence[Node], inputs: Sequence[Node], weights: Sequence[Node]
) -> list[Group]:
    """Return where to cut the graph behind these roots.

    The second half also continues from a root that leads to no input.
    """
    before = construct_reverse_graph(list(roots))
    if not inputs:
        reached = {weight for weight in weights if weight in before or weight in roots}
        return [Group(reached, list(dict.fromkeys(roots)))] if reached else []
    return _group(inputs, weights, before, set(roots))


def get_param_groups(
    inputs: list[Node], params: list[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> list[dict[str, Any]]:
    """Return parameters together with the nodes where their ways part from those of the inputs."""
    groups = _group(inputs, params, reverse_edges_dict, set())
    return [{"params": group.weights, "intermediates": set(group.nodes)} for group in groups]


def _group(
    inputs: Sequence[Node],
    weights: Sequence[Node],
    before: dict[Node, list[Node]],
    roots: set[Node],
) -> list[Group]:
    on_the_way, _ = reverse_closure(list(inputs), set(), before)
    starts: dict[Node, set[Node]] = {}
    for weight in weights:
        found, met = reverse_closure([weight], on_the_way, before)
        for node in met | (found & roots):
            starts.setdefault(node, set()).add(weight)
    return _join_nodes(starts)


def construct_reverse_graph(roots: list[Node]) -> dict[Node, list[Node]]:
    """Return, for every node behind the roots, the nodes that lead to it."""
    reverse: dict[Node, list[Node]] = {}
    waiting, seen = list(roots), set(roots)
    while waiting:
        node = waiting.pop()
        for after, _ in node.next_functions:
            if after is not None:
                reverse.setdefault(after, []).append(node)
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
    return reverse


def reverse_closure(
    roots: list[Node], target_nodes: set[Node], reverse_edges_dict: dict[Node, list[Node]]
) -> tuple[set[Node], set[Node]]:
    """Return all nodes that lead to the roots, up to target nodes, and the target nodes met."""
    found, met = set(roots), set()
    waiting = list(roots)
    while waiting:
        for before in reverse_edges_dict.get(waiting.pop(), ()):
            if before in target_nodes:
                met.add(before)
            elif before not in found:
                waiting.append(before)
            found.add(before)
    return found, met


def _join_nodes(starts: dict[Node, set[Node]]) -> list[Group]:
    """Return nodes with a weight in common, however indirectly, together."""
    group_of: dict[Node, Group] = {}
    groups: dict[int, Group] = {}
    for node, weights in starts.items():
        joined = Group(set(weights), [node])
        for other in {id(g): g for w in weights if (g := group_of.get(w))}.values():
            joined.weights |= other.weights
            joined.nodes = [*other.nodes, *joined.nodes]
            del groups[id(other)]
        groups[id(joined)] = joined
        group_of.update(dict.fromkeys(joined.weights, joined))
    return list(groups.values())
