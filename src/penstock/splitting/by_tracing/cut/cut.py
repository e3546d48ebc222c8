"""Cuts a traced graph into one graph for each stage."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from penstock.errors import ModelError
from penstock.ir.dataflow import Dataflow, Routed
from penstock.splitting.by_tracing.capture.capture import Capture
from penstock.splitting.by_tracing.capture.regions import (
    OPEN_REGIONS,
    Region,
    change_regions,
    regions_of,
)
from penstock.splitting.by_tracing.cut.assignment import assign_stages, is_scalar
from penstock.splitting.by_tracing.cut.rerouting import LinkedValues
from penstock.splitting.by_tracing.cut.routes import Routes, find_routes, find_size
from penstock.splitting.by_tracing.cut.state_owners import StateOwners, find_owners
from penstock.splitting.by_tracing.cut.storage import written_arguments
from penstock.splitting.marks import is_mark

__all__ = ["Cut", "cut_graph", "route"]


@dataclass(frozen=True, eq=False)
class Cut:
    """The graph of each stage, the owners of its state, the dataflow and what it carries."""

    graphs: tuple[fx.Graph, ...]
    owners: StateOwners
    dataflow: Dataflow
    values: LinkedValues


def cut_graph(
    capture: Capture, starts: Collection[fx.Node], *, shared: Literal["replicate", "transmit"]
) -> Cut:
    """Cut a traced model into stages that begin at these nodes of its graph.

    A parameter that several stages use is held by each of them (`replicate`), or by the first one,
    which sends it to the others (`transmit`).
    """
    graph = capture.module.graph
    num_stages = len(starts) + 1
    stages = assign_stages(graph, starts)
    transmitted = _shared_parameters(capture, stages) if shared == "transmit" else []
    routes = find_routes(graph, stages, num_stages, transmitted)
    home = {node: routes.home[node] for node in routes.attributes}
    owners = find_owners(capture.model, graph, stages, num_stages, home)
    builders = [_Builder(stage, stages, routes, owners) for stage in range(num_stages)]
    graphs = tuple(builder.build(graph) for builder in builders)
    return Cut(graphs, owners, routes.dataflow, routes.values())


def _shared_parameters(capture: Capture, stages: Mapping[fx.Node, int]) -> list[fx.Node]:
    parameters = dict(capture.model.named_parameters(remove_duplicate=False))
    return [
        node
        for node in capture.module.graph.nodes
        if node.op == "get_attr"
        and node.target in parameters
        and len({stages[user] for user in node.users}) > 1
    ]


def route(consumers: tuple[int, ...], payloads: tuple[Any, ...]) -> Routed:
    """Return the output of a stage that has something different for each stage that it feeds."""
    return Routed(dict(zip(consumers, payloads, strict=True)))


@dataclass(eq=False)
class _Builder:
    """Builds the graph of one stage."""

    stage: int
    stages: Mapping[fx.Node, int]
    routes: Routes
    owners: StateOwners
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    attributes: dict[str, fx.Node] = field(default_factory=dict)
    open: tuple[Region, ...] = ()
    regions: fx.Node | None = None

    def build(self, whole: fx.Graph) -> fx.Graph:
        """Return the graph of this stage, from that of the whole model."""
        own = [node for node in whole.nodes if self.stages.get(node) == self.stage]
        if any(regions_of(node) for node in own):
            self.regions = self.graph.placeholder(OPEN_REGIONS)
        inputs = [node for node in own if node.op == "placeholder"]
        for node in inputs if self.stage == 0 else self.routes.received(self.stage):
            self.made[node] = self._note(self.graph.placeholder(_input_name(node)), node)
        for node in own:
            if node.op == "output":
                self._enter(())
                self.graph.output(fx.map_arg(node.args[0], self._taker(node)))
            elif node.op != "placeholder" and not is_mark(node):
                self._enter(regions_of(node))
                self.made[node] = self._copy(node)
        if self.stage < self.routes.dataflow.num_stages - 1:
            self._enter(())
            self.graph.output(self._payload())
        self.graph.lint()
        return self.graph

    def _enter(self, regions: tuple[Region, ...]) -> None:
        for function, args in change_regions(self.open, regions):
            self.graph.call_function(function, (self.regions, *args))
        self.open = regions

    def _copy(self, node: fx.Node) -> fx.Node:
        take = self._taker(node)
        if path := self._linear_layer(node):
            value = fx.map_arg(node.args[0], take)
            return self._note(self.graph.call_module(path, (value,)), node)
        return self._note(self.graph.node_copy(node, take), node)

    def _note(self, new: fx.Node, old: fx.Node) -> fx.Node:
        new.meta = dict(old.meta)
        return new

    def _taker(self, user: fx.Node) -> Callable[[fx.Node], fx.Node]:
        return lambda value: self._take(value, user)

    def _take(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """Return the node of this stage's graph for a value of the whole graph."""
        if value in self.made:
            return self.made[value]
        if value.op == "get_attr":
            return self._attribute(value, user)
        if value in self.routes.rebuilt:
            self.made[value] = self._rebuild(value)
        elif is_scalar(value):
            self.made[value] = self._recompute(value)
        else:
            raise AssertionError(f"{value} does not reach stage {self.stage}")
        return self.made[value]

    def _attribute(self, node: fx.Node, user: fx.Node) -> fx.Node:
        name = self.owners.used_as.get((node, user)) or self._any_name(node)
        if name not in self.attributes:
            made = self.graph.create_node("get_attr", name)
            self.attributes[name] = self._note(made, node)
        return self.attributes[name]

    def _any_name(self, node: fx.Node) -> str:
        used_as = self.owners.used_as
        users = (user for user in node.users if self.stages[user] == self.stage)
        names = (used_as[node, user] for user in users if (node, user) in used_as)
        return next(names, str(node.target))

    def _rebuild(self, value: fx.Node) -> fx.Node:
        """Make a view again from the value whose memory it shares."""
        written = list(written_arguments(value))
        if written:
            return self._take(written[0], value)
        source = self.routes.rebuilt[value].base
        if not value.all_input_nodes or value is source:
            raise ModelError(
                f"{value} shares memory with a value of another stage in a way that cannot be "
                "rebuilt there; cut before it, or clone it"
            )
        return self._note(self.graph.node_copy(value, self._taker(value)), value)

    def _recompute(self, value: fx.Node) -> fx.Node:
        """Compute a number again from the sizes of tensors on this stage."""
        found = find_size(value, self.made)
        if found is None:
            return self._note(self.graph.node_copy(value, self._taker(value)), value)
        tensor, dimension = found
        size = torch.ops.aten.sym_size.int
        return self._note(self.graph.call_function(size, (self.made[tensor], dimension)), value)

    def _linear_layer(self, node: fx.Node) -> str | None:
        """Return the path of the linear layer that a node is all of, or None."""
        if node.target is not torch.ops.aten.linear.default or node.kwargs:
            return None
        _, weight, bias = (*node.args, None)[:3]
        if not isinstance(weight, fx.Node):
            return None
        path, _, attribute = self.owners.used_as.get((weight, node), "").rpartition(".")
        if attribute != "weight" or not self.owners.is_own(self.stage, path):
            return None
        layer = self.owners.model.get_submodule(path)
        name = f"{path}.bias" if getattr(layer, "bias", None) is not None else None
        found = self.owners.used_as.get((bias, node)) if isinstance(bias, fx.Node) else None
        is_same = found == name and (bias is None) == (name is None)
        return path if _is_plain(layer) and is_same else None

    def _payload(self) -> Any:
        consumers = self.routes.dataflow.consumers(self.stage)
        sent = [self.routes.links[self.stage, consumer] for consumer in consumers]
        values = {
            node: self._send(node) for node in dict.fromkeys(n for nodes in sent for n in nodes)
        }
        payloads = [tuple(values[node] for node in nodes) for nodes in sent]
        bare: list[Any] = [p[0] if len(p) == 1 else p for p in payloads]
        if len(set(payloads)) > 1:
            return self.graph.call_function(route, (consumers, tuple(bare)))
        return bare[0] if bare else ()

    def _send(self, node: fx.Node) -> fx.Node:
        value = self._take(node, node)
        if self.routes.home[node] != self.stage:
            return value
        if node in self.routes.snapshots:
            return self._note(
                self.graph.call_function(torch.ops.aten.clone.default, (value,)), node
            )
        if node in self.routes.attributes:
            return self._note(
                self.graph.call_function(torch.ops.aten.alias.default, (value,)), node
            )
        return value


def _input_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "placeholder" else node.name


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a module is an `nn.Linear` without hooks or another forward."""
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return type(layer) is nn.Linear and not any(hooks) and "forward" not in layer.__dict__
