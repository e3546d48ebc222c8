"""Nodes of a traced graph that share memory, and the nodes that write to it.

Values that share memory cannot be sent separately if a later stage writes to it: a write to one
would not change the other. Then only the first of them is sent, and the others are made again from
it, as views.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from penstock.torch_private import OpOverload

__all__ = ["TensorStorage", "find_storages", "is_write", "written_arguments"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorStorage:
    """The nodes that share one piece of memory, and those that write to it, in order."""

    members: tuple[fx.Node, ...]
    writers: tuple[fx.Node, ...]

    @property
    def base(self) -> fx.Node:
        """The node that all others are made from."""
        return self.members[0]


def is_write(node: fx.Node) -> bool:
    """Return whether a node writes to one of its arguments."""
    return any(True for _ in written_arguments(node))


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that a node writes to."""
    if not isinstance(node.target, OpOverload):
        return
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = (
                node.args[position]
                if position < len(node.args)
                else node.kwargs.get(argument.name)
            )
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, fx.Node):
                    yield one
    yield from _running_statistics(node)


def _running_statistics(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the statistics that normalisation writes to in training; its schema omits them."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (torch.ops.aten.batch_norm, torch.ops.aten.instance_norm) and node.args[5]:
        yield from (argument for argument in node.args[3:5] if isinstance(argument, fx.Node))


def find_storages(graph: fx.Graph) -> dict[fx.Node, TensorStorage]:
    """Return the storage of each node whose memory is written to."""
    members: dict[int, list[fx.Node]] = {}
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        key = _memory(node)
        if key is not None:
            members.setdefault(key, []).append(node)
        for written in written_arguments(node):
            if (touched := _memory(written)) is not None:
                writers.setdefault(touched, []).append(node)
    storages = [TensorStorage(tuple(members[key]), tuple(found)) for key, found in writers.items()]
    return {node: storage for storage in storages for node in storage.members}


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if node.op == "output" or not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)
