"""What crosses from stage to stage when a traced graph is cut.

A value goes from the stage that makes it to the first stage that needs it, from there to the next
one that needs it, and so on: over each link once.

    made in 0, used in 1 and 3:     0 -> 1 -> 3
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from penstock.errors import ModelError
from penstock.ir.dataflow import Dataflow
from penstock.splitting.by_tracing.cut.assignment import is_scalar
from penstock.splitting.by_tracing.cut.storage import Storage, find_storages

__all__ = ["Routes", "find_routes", "find_size"]


@dataclass(frozen=True, eq=False)
class Routes:
    """Where each value is made, and what each link carries, in the order of the graph.

    `rebuilt` holds values that are made again from the one whose memory they share. `attributes`
    are those parameters and buffers that travel, since only one stage holds them. `snapshots` may
    be overwritten where they are made before they are used, so a copy of them is sent.
    """

    home: Mapping[fx.Node, int]
    links: Mapping[tuple[int, int], tuple[fx.Node, ...]]
    rebuilt: Mapping[fx.Node, Storage]
    attributes: frozenset[fx.Node]
    snapshots: frozenset[fx.Node]
    dataflow: Dataflow

    def received(self, stage: int) -> list[fx.Node]:
        """The values that a stage is called with."""
        return [node for p in self.dataflow.producers(stage) for node in self.links[p, stage]]


def find_routes(
    graph: fx.Graph,
    stages: Mapping[fx.Node, int],
    num_stages: int,
    transmitted: Iterable[fx.Node],
) -> Routes:
    """Work out what crosses; the first users of `transmitted` attributes send them on."""
    storages = find_storages(graph)
    rebuilt = {n: s for n, s in storages.items() if _is_written_behind(s, stages)}
    home = dict(stages)
    overwritten = _find_overwritten(storages, stages)
    attributes = frozenset({*transmitted, *overwritten})
    for node in attributes:
        home[node] = min(stages[user] for user in node.users)
    needs = _find_needs(graph, stages, home, rebuilt)
    _add_scalars(graph, stages, needs)
    order = {node: position for position, node in enumerate(graph.nodes)}
    links: dict[tuple[int, int], list[fx.Node]] = {}
    for node in sorted(needs, key=order.__getitem__):
        here = home[node]
        for stage in sorted(needs[node] - {here}):
            links.setdefault((here, stage), []).append(node)
            here = stage
    snapshots = frozenset(n for n, s in storages.items() if s.base.op == "get_attr")
    return Routes(
        home,
        {link: tuple(nodes) for link, nodes in links.items()},
        rebuilt,
        attributes,
        snapshots,
        Dataflow(num_stages, list(links)),
    )


def _is_written_behind(storage: Storage, stages: Mapping[fx.Node, int]) -> bool:
    """Whether memory is written to in a later stage than the one that makes it."""
    base = storage.base
    return base.op != "get_attr" and any(stages[w] > stages[base] for w in storage.writers)


def _find_overwritten(
    storages: Mapping[fx.Node, Storage], stages: Mapping[fx.Node, int]
) -> set[fx.Node]:
    """Buffers that one stage writes to and later stages read."""
    found = set()
    for node, storage in storages.items():
        if node is not storage.base or node.op != "get_attr":
            continue
        writing = {stages[writer] for writer in storage.writers}
        touching = {stages[user] for user in node.users} | writing
        if writing != {min(touching)}:
            raise ModelError(
                f"the buffer {node.target} is used in stage {min(touching)} and written to in "
                f"stage {max(writing)}, so microbatches would overtake each other; cut elsewhere"
            )
        if len(touching) > 1:
            found.add(node)
    return found


def _find_needs(
    graph: fx.Graph,
    stages: Mapping[fx.Node, int],
    home: Mapping[fx.Node, int],
    rebuilt: Mapping[fx.Node, Storage],
) -> dict[fx.Node, set[int]]:
    """For each value but numbers, the stages that need it; for shared memory, of its first."""
    needs: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if node not in stages or node.target is torch.ops.aten.sym_size.int:
            continue
        for value in node.all_input_nodes:
            if value in rebuilt:
                needs.setdefault(rebuilt[value].base, set()).add(stages[node])
            elif value in home and not is_scalar(value):
                needs.setdefault(value, set()).add(stages[node])
    return {node: found for node, found in needs.items() if found - {home[node]}}


def _add_scalars(
    graph: fx.Graph, stages: Mapping[fx.Node, int], needs: dict[fx.Node, set[int]]
) -> None:
    """Let the numbers cross that a stage cannot work out from the tensors that it gets."""
    for user in graph.nodes:
        if user not in stages:
            continue
        stage = stages[user]
        if stage == 0:
            continue
        here = [node for node, found in needs.items() if stage in found]
        for node in _leaves(user, stages):
            if find_size(node, here) is None:
                needs.setdefault(node, set()).add(stage)


def _leaves(user: fx.Node, stages: Mapping[fx.Node, int]) -> Iterable[fx.Node]:
    """The numbers from earlier stages at the bottom of what a node uses."""
    stack = [value for value in user.all_input_nodes if is_scalar(value)]
    while stack:
        node = stack.pop()
        if stages[node] == stages[user]:
            continue
        inner = [value for value in node.all_input_nodes if is_scalar(value)]
        is_arithmetic = len(inner) == len(node.all_input_nodes) and inner
        if is_arithmetic:
            stack.extend(inner)
        else:
            yield node


def find_size(node: fx.Node, tensors: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """A tensor and a dimension of it that has the size which a node stands for."""
    value = node.meta["val"]
    if not isinstance(value, torch.SymInt) or node.target is not torch.ops.aten.sym_size.int:
        return None
    for tensor in tensors:
        shape = getattr(tensor.meta.get("val"), "shape", ())
        for dimension, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                return tensor, dimension
    return None
