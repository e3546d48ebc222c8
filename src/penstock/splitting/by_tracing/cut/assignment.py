"""Assigns each node of a traced graph to a stage, when the graph is cut before given nodes.

Most nodes are assigned by their position. Three kinds are not: one of several results, and the
size of a tensor, go with what they are taken from; a write to a buffer at the end of the model
goes to the stage that has computed the value.
"""

import operator
from collections.abc import Collection, Iterator

import torch
from torch import fx

from penstock.errors import ModelError
from penstock.splitting.by_tracing.capture.traced_graph import module_paths
from penstock.splitting.marks import is_mark

__all__ = ["assign_stages", "is_scalar", "is_work"]


def is_scalar(node: fx.Node) -> bool:
    """Return whether a node is a number that is computed from sizes."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)


def is_work(node: fx.Node) -> bool:
    """Return whether a node computes something."""
    is_call = node.op in ("call_function", "call_module", "call_method")
    return is_call and not is_mark(node) and not is_scalar(node) and not _is_part_of(node)


def _is_part_of(node: fx.Node) -> bool:
    """Return whether a node takes one of several results of another node."""
    return node.target is operator.getitem and not isinstance(
        node.all_input_nodes[0].meta.get("val"), torch.Tensor
    )


def _is_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def assign_stages(graph: fx.Graph, starts: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return the stage of every node but attributes; a new stage begins at each of `starts`."""
    stages: dict[fx.Node, int] = {}
    stage = 0
    for node in graph.nodes:
        stage += node in starts
        if node.op == "get_attr":
            continue
        source = node.all_input_nodes[0] if _is_part_of(node) or _is_size(node) else None
        stages[node] = stages.get(source, 0) if source is not None else stage
    for node in graph.nodes:
        if value := _written_back(node):
            stages[node] = _earliest(node, value, stages)
            if node.args[1] is not value:
                stages[node.all_input_nodes[1]] = stages[node]
    _refuse_idle(graph, starts, stages)
    return stages


def _written_back(node: fx.Node) -> fx.Node | None:
    """Return what a node copies into a buffer at the end of the model, or None for other nodes."""
    if node.target is not torch.ops.aten.copy_.default or node.users:
        return None
    buffer, value = node.all_input_nodes[0], node.all_input_nodes[-1]
    if buffer.op != "get_attr" or value is buffer:
        return None
    if value.target is torch.ops.aten.detach.default and len(value.users) == 1:
        value = value.all_input_nodes[0]
    return None if value.op == "get_attr" else value


def _earliest(node: fx.Node, value: fx.Node, stages: dict[fx.Node, int]) -> int:
    """Return the first stage that has the value and after which no stage reads the buffer."""
    readers = (stages[user] for user in node.all_input_nodes[0].users if user is not node)
    return max(stages[value], *readers, 0)


def _refuse_idle(graph: fx.Graph, starts: Collection[fx.Node], stages: dict[fx.Node, int]) -> None:
    busy = {stages[node] for node in graph.nodes if node in stages and is_work(node)}
    ordered = [node for node in graph.nodes if node in starts]
    for stage in range(len(ordered) + 1):
        if stage not in busy:
            sides = list(_sides(ordered, stage))
            raise ModelError(
                f"stage {stage} of {len(ordered) + 1} has nothing to do: it would be "
                f"{' and '.join(sides)}; remove one of the marks"
            )


def _sides(starts: list[fx.Node], stage: int) -> Iterator[str]:
    if stage > 0:
        yield f"after the mark {_place(starts[stage - 1])}"
    if stage < len(starts):
        yield f"before the mark {_place(starts[stage])}"


def _place(node: fx.Node) -> str:
    paths = module_paths(node)
    return f"in {paths[-1]!r}" if paths and paths[-1] else "in the model's own forward"
