"""Routes of values between the stages of a traced graph.

A value is sent from the stage that computes it to the first stage that needs it, from there to the
next one that needs it, and so on: over each link once.

    computed in 0, used in 1 and 3:     0 -> 1 -> 3
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from penstock.errors import ModelError
from penstock.ir.dataflow import Dataflow
from penstock.splitting.by_tracing.cut.assignment import is_scalar
from penstock.splitting.by_tracing.cut.rerouting import LinkedValues
from penstock.splitting.by_tracing.cut.storage import TensorStorage, find_storages

__all__ = ["Routes", "find_routes", "find_size"]


@dataclass(frozen=True, eq=False)
class Routes:
    """The stage of each value, and what each link carries, in the order of the graph.

    - `home`: the stage that computes or holds each value.
    - `rebuilt`: values that are made again from the one whose memory they share.
    - `attributes`: parameters and buffers that are sent, because only one stage holds them.
    - `snapshots`: values that may be overwritten before they are used, so copies are sent.
    """

    home: Mapping[fx.Node, int]
    links: Mapping[tuple[int, int], tuple[fx.Node, ...]]
    rebuilt: Mapping[fx.Node, TensorStorage]
    attributes: frozenset[fx.Node]
    snapshots: frozenset[fx.Node]
    dataflow: Dataflow

    def received(self, stage: int) -> list[fx.Node]:
        """Return the values that a stage is called with."""
        return [node for p in self.dataflow.producers(stage) for node in self.links[p, stage]]

    def values(self) -> LinkedValues:
        """Return what the links carry, with numbers for the values."""
        found = {node for nodes in self.links.values() for node in nodes}
        number = {node: n for n, node in enumerate(sorted(found))}
        links = {link: tuple(number[n] for n in nodes) for link, nodes in self.links.items()}
        written = {storage.base for storage in self.rebuilt.values()} & found
        return LinkedValues(
            self.dataflow.num_stages, links, frozenset(number[node] for node in written)
        )


def find_routes(
    graph: fx.Graph,
    stages: Mapping[fx.Node, int],
    num_stages: int,
    transmitted: Iterable[fx.Node],
) -> Routes:
    """Find the routes; the first users of `transmitted` attributes hold and send them."""
    storages = find_storages(graph)
    rebuilt = {n: s for n, s in storages.items() if _is_written_later(s, stages)}
    home = dict(stages)
    overwritten = _find_overwritten(storages, stages)
    attributes = frozenset({*transmitted, *overwritten})
    for node in attributes:
        home[node] = min(stages[user] for user in node.users)
    users = _find_users(graph, stages, home, rebuilt)
    _add_scalars(graph, stages, users)
    order = {node: position for position, node in enumerate(graph.nodes)}
    links: dict[tuple[int, int], list[fx.Node]] = {}
    for node in sorted(users, key=order.__getitem__):
        here = home[node]
        for stage in sorted(users[node] - {here}):
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


def _is_written_later(storage: TensorStorage, stages: Mapping[fx.Node, int]) -> bool:
    """Return whether memory is written to in a later stage than the one that allocates it."""
    base = storage.base
    return base.op != "get_attr" and any(stages[w] > stages[base] for w in storage.writers)


def _find_overwritten(
    storages: Mapping[fx.Node, TensorStorage], stages: Mapping[fx.Node, int]
) -> set[fx.Node]:
    """Return the buffers that one stage writes to and later stages read."""
    found = set()
    for node, storage in storages.items():
        if node is not storage.base or node.op != "get_attr":
            continue
        writing = {stages[writer] for writer in storage.writers}
        touching = {stages[user] for user in node.users} | writing
        if writing != {min(touching)}:
            raise ModelError(
                f"the buffer {node.target} is used in stage {min(touching)} and written to in "
                f"stage {max(writing)}, so microbatches would overtake each other; cut at another "
                "place"
            )
        if len(touching) > 1:
            found.add(node)
    return found


def _find_users(
    graph: fx.Graph,
    stages: Mapping[fx.Node, int],
    home: Mapping[fx.Node, int],
    rebuilt: Mapping[fx.Node, TensorStorage],
) -> dict[fx.Node, set[int]]:
    """Return the stages that use each value, except numbers; shared memory counts for its base."""
    users: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if node not in stages or node.target is torch.ops.aten.sym_size.int:
            continue
        for value in node.all_input_nodes:
            if value in rebuilt:
                users.setdefault(rebuilt[value].base, set()).add(stages[node])
            elif value in home and not is_scalar(value):
                users.setdefault(value, set()).add(stages[node])
    return {node: found for node, found in users.items() if found - {home[node]}}


def _add_scalars(
    graph: fx.Graph, stages: Mapping[fx.Node, int], users: dict[fx.Node, set[int]]
) -> None:
    """Add the numbers that a stage cannot compute from the tensors that it gets."""
    for user in graph.nodes:
        if user not in stages:
            continue
        stage = stages[user]
        if stage == 0:
            continue
        here = [node for node, found in users.items() if stage in found]
        for node in _inner_numbers(user, stages):
            if find_size(node, here) is None:
                users.setdefault(node, set()).add(stage)


def _inner_numbers(user: fx.Node, stages: Mapping[fx.Node, int]) -> Iterable[fx.Node]:
    """Yield the numbers of earlier stages from which the numbers that a node uses are computed."""
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
    """Return a tensor and its dimension that has the size which a node computes, or None."""
    value = node.meta["val"]
    if not isinstance(value, torch.SymInt) or node.target is not torch.ops.aten.sym_size.int:
        return None
    for tensor in tensors:
        shape = getattr(tensor.meta.get("val"), "shape", ())
        for dimension, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                return tensor, dimension
    return None
