"""Where a recorded graph can be cut, so that weight gradients are made after input gradients.

    output -- n1 -- n2 -- input        n1, n2: nodes on the way to an input
              |     |                  the cut: their edges to what leads to weights only
              w1    w2

The gradient that arrives at such a node serves both ways. So the first half notes it, and the
second half continues from there. Nodes that lead to a common weight form one group: their part of
the graph is run in one pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd.graph import Node

__all__ = ["Group", "find_groups", "join_nodes"]


@dataclass(slots=True)
class Group:
    """Weights, and the nodes from which all of their gradients come."""

    weights: set[Node]
    nodes: list[Node]


def find_groups(
    roots: Sequence[Node], inputs: Iterable[Node], weights: Iterable[Node]
) -> list[Group]:
    """Return where to cut the graph behind these roots.

    The second half also continues from a root that leads to no input.
    """
    inputs, weights = set(inputs), set(weights)
    behind = _sort_from_leaves(roots, stops=inputs)
    leads_to_input = _find_ways(behind, inputs)
    reached = _find_weights([node for node in behind if node not in leads_to_input], weights)
    starts: dict[Node, set[Node]] = {}
    for node in behind:
        if node in leads_to_input and node not in inputs:
            starts[node] = _union(reached.get(after, set()) for after in _after(node))
    for root in roots:
        if root not in leads_to_input:
            starts[root] = reached[root]
    return join_nodes({node: found for node, found in starts.items() if found})


def _after(node: Node) -> list[Node]:
    return [after for after, _ in node.next_functions if after is not None]


def _sort_from_leaves(roots: Sequence[Node], stops: set[Node]) -> list[Node]:
    """Return the nodes behind the roots up to the stops, each after all that it leads to."""
    done: dict[Node, None] = {}
    entered: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            done[node] = None
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            if node not in stops:
                stack.extend((after, False) for after in _after(node) if after not in entered)
    return list(done)


def _find_ways(behind: Sequence[Node], inputs: set[Node]) -> set[Node]:
    """Return the nodes that lead to an input, and those of the inputs."""
    found: set[Node] = set()
    for node in behind:
        if node in inputs or any(after in found for after in _after(node)):
            found.add(node)
    return found


def _find_weights(behind: Sequence[Node], weights: set[Node]) -> dict[Node, set[Node]]:
    """Return the weights that each node leads to."""
    reached: dict[Node, set[Node]] = {}
    for node in behind:
        found = _union(reached.get(after, set()) for after in _after(node))
        reached[node] = {*found, node} if node in weights else found
    return reached


def _union(sets: Iterable[set[Node]]) -> set[Node]:
    return set().union(*sets)


def join_nodes(starts: dict[Node, set[Node]]) -> list[Group]:
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
