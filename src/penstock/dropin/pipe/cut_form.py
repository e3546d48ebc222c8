"""A cut model in the form of torch's pipes: stages that return tuples, and a graph of calls.

Penstock's own stages hand on what later stages need. Here a value goes straight from the stage
that makes it to each stage that uses it, and an argument of the model enters where it is used:

    x ---> submod_pp_0 ---> submod_pp_1 ---> submod_pp_2 ---> (output,)
                   |                           ^  ^
                   +---------------------------+  |
    y --------------------------------------------+
"""

import operator
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from penstock.dropin.pipe.graphs import get_submod_name
from penstock.ir.dataflow import Dataflow
from penstock.splitting.by_tracing.capture.capture import Capture
from penstock.splitting.by_tracing.capture.entry import Entry, TracedInput
from penstock.splitting.by_tracing.capture.regions import OPEN_REGIONS
from penstock.splitting.by_tracing.capture.sizes import hint_of
from penstock.splitting.by_tracing.cut.cut import Cut, route
from penstock.splitting.by_tracing.cut.storage import find_storages
from penstock.splitting.by_tracing.stage.graph_stage import GraphStage
from penstock.splitting.by_tracing.traced import make_stage
from penstock.torch_private import pytree

__all__ = ["give_form", "signature_of"]


class _Value(NamedTuple):
    """A node of the stage that makes it; without a stage, an argument of the model."""

    stage: int | None
    node: fx.Node


class _Part:
    """One stage: its graph, and the value that each of its inputs is."""

    def __init__(self, index: int, graph: fx.Graph) -> None:
        self.index, self.graph = index, graph
        self.origins: dict[fx.Node, _Value] = {}
        self.made: list[fx.Node] = []
        self._copy_written_inputs()

    def _copy_written_inputs(self) -> None:
        """Write to copies: what is received is a leaf, and may be another stage's input too."""
        written, inputs = find_storages(self.graph), self.inputs
        for node in [node for node in inputs if node in written]:
            users = list(node.users)
            with self.graph.inserting_after(inputs[-1]):
                clone = self.graph.call_function(torch.ops.aten.clone.default, (node,))
            for user in users:
                user.replace_input_with(node, clone)

    @property
    def inputs(self) -> list[fx.Node]:
        nodes = self.graph.find_nodes(op="placeholder")
        return [node for node in nodes if node.target != OPEN_REGIONS]

    @property
    def takes_arguments(self) -> bool:
        return any(self.origins[node].stage is None for node in self.inputs)

    def find_value(self, node: fx.Node) -> _Value:
        """Return what a node is: an input that is passed on, or something that is made here."""
        return self.origins.get(node, _Value(self.index, node))

    def find_sent(self, consumer: int) -> tuple[Any, ...]:
        """Return what goes to another stage, or is the model's output."""
        sent: Any = self.graph.output_node().args[0]
        if isinstance(sent, fx.Node) and sent.target is route:
            consumers, payloads = cast(tuple[Any, Any], sent.args)
            sent = payloads[consumers.index(consumer)]
        return (sent,) if isinstance(sent, fx.Node) else tuple(sent)

    def give_out(self, nodes: list[fx.Node]) -> None:
        """Let the graph return these nodes, and remove inputs that become unused."""
        output, self.made = self.graph.output_node(), nodes
        (before,) = output.args
        output.args = (nodes[0] if len(nodes) == 1 else tuple(nodes),)
        if isinstance(before, fx.Node) and before.target is route:
            self.graph.erase_node(before)
        if self.index > 0:
            self.forget_unused()

    def forget_unused(self) -> None:
        for node in self.inputs:
            if not node.users:
                self.graph.erase_node(node)

    def put_arguments_last(self) -> None:
        """Take what other stages send first, and arguments of the model, given by name, last."""
        for node in self.inputs:
            if self.origins[node].stage is None and node is not self.inputs[-1]:
                self.inputs[-1].append(node)

    def name_inputs(self) -> Entry:
        """Take inputs also by their names, and of any size."""
        free, signature = [], signature_of(self.inputs)
        for name, node in zip(signature.parameters, self.inputs, strict=True):
            shape = tuple(map(hint_of, node.meta["val"].shape))
            sizes = tuple(f"{name}_{d}" for d in range(len(shape)))
            free.append(TracedInput(name, sizes, shape))
        spec = pytree.tree_structure(((0,) * len(free), {}))
        return Entry(signature, spec, tuple(free), ())


def signature_of(inputs: Sequence[fx.Node]) -> Signature:
    """Return the signature of a graph with these inputs, taken by place or by name."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature([Parameter(str(node.target), kind) for node in inputs])


def give_form(
    traced: Capture, cut: Cut, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[GraphStage], fx.Graph]:
    """Return the stages of a cut model, and the graph that calls them with such arguments."""
    parts = [_Part(index, graph) for index, graph in enumerate(cut.graphs)]
    arguments = parts[0].inputs
    _find_origins(parts, cut.dataflow)
    results = [_find_result(parts[-1], leaf) for leaf in parts[-1].find_sent(len(parts))]
    _go_straight(parts, results)
    entries: list[Entry | None] = [None] * len(parts)
    is_returned = any(isinstance(value, _Value) and value.stage is None for value in results)
    graph, known, named = fx.Graph(), dict[_Value, fx.Node](), dict[str, fx.Node]()
    # Others than the first stage may use an argument of the model, or return it.
    if is_returned or any(part.takes_arguments for part in parts[1:]):
        parts[0].forget_unused()
        for part in parts:
            part.put_arguments_last()
            if part.takes_arguments:
                entries[part.index] = part.name_inputs()
        known = {_Value(None, node): graph.placeholder(str(node.target)) for node in arguments}
        given = tuple(known[_Value(None, node)] for node in parts[0].inputs)
    else:
        entries[0] = traced.entry
        given, named = _take_arguments(graph, traced.entry.signature, args, kwargs)
    _write_calls(graph, known, given, named, parts, results)
    stages = [make_stage(traced, cut, index, entry, None) for index, entry in enumerate(entries)]
    return stages, graph


def _find_origins(parts: Sequence[_Part], dataflow: Dataflow) -> None:
    parts[0].origins = {node: _Value(None, node) for node in parts[0].inputs}
    for part in parts[1:]:
        received = [
            parts[producer].find_value(node)
            for producer in dataflow.producers(part.index)
            for node in parts[producer].find_sent(part.index)
        ]
        part.origins = dict(zip(part.inputs, received, strict=True))


def _find_result(last: _Part, leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    value = last.find_value(leaf)
    return value if value.stage is None else _Value(last.index, leaf)


def _go_straight(parts: Sequence[_Part], results: Sequence[Any]) -> None:
    """Let each stage return what others use of what it has made, and nothing that passes by."""
    returned = dict.fromkeys(value for value in results if isinstance(value, _Value))
    parts[-1].give_out([value.node for value in returned if value.stage is not None])
    wanted = {parts[-1].origins[node] for node in parts[-1].inputs}
    for part in reversed(parts[:-1]):
        part.give_out([n for n in part.graph.nodes if _Value(part.index, n) in wanted])
        wanted |= {part.origins[node] for node in part.inputs}


def _take_arguments(
    graph: fx.Graph, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[fx.Node, ...], dict[str, fx.Node]]:
    """Begin with the arguments of the model, in the way in which they were given."""
    bound = signature.bind(*args, **kwargs)
    names: list[str] = []
    for parameter in signature.parameters.values():
        rest = len(bound.args) - len(names)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{number}" for number in range(rest)]
        elif rest:
            names.append(parameter.name)
    positional = tuple(graph.placeholder(name) for name in names)
    return positional, {name: graph.placeholder(name) for name in bound.kwargs}


def _write_calls(
    graph: fx.Graph,
    known: dict[_Value, fx.Node],
    given: tuple[fx.Node, ...],
    named: dict[str, Any],
    parts: Sequence[_Part],
    results: Sequence[Any],
) -> None:
    for part in parts:
        received = tuple(known[part.origins[n]] for n in part.inputs) if part.index else given
        kwargs = {} if part.index else named
        call = graph.call_module(get_submod_name(part.index), received, kwargs)
        for number, node in enumerate(part.made):
            is_alone = len(part.made) == 1
            item = call if is_alone else graph.call_function(operator.getitem, (call, number))
            known[_Value(part.index, node)] = item
    graph.output(tuple(known[x] if isinstance(x, _Value) else x for x in results))
