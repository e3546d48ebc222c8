"""Flat graphs get the modules back that they were traced through."""

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from penstock.dropin._unflatten import _outline_submodules

torch_unflatten: Any = pytest.importorskip("torch.distributed.pipelining._unflatten")
SIZE = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.up(x))
        return self.down(hidden), hidden


class Model(nn.Module):
    """Nested modules, one of which runs twice, and operations of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, hidden = self.block(x)
        x, again = self.block(x + hidden)
        output: torch.Tensor = self.last(x * again)
        return output


def trace(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    module = torch.export.export(model, (x,)).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    # A graph without the tree of its arguments: it takes and returns plain values.
    return fx.GraphModule(module, copy.copy(module.graph))


def flat_graph(model: nn.Module, x: torch.Tensor) -> fx.Graph:
    """Return the graph with parameters as inputs, the form in which torch outlines a stage."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    nodes = list(trace(model, x).graph.nodes)
    for node in nodes:
        if node.op == "get_attr":
            made[node] = graph.placeholder(node.name)
            made[node].meta = {}
    for node in nodes:
        if node.op not in ("get_attr", "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
    return graph


def calls(module: nn.Module) -> dict[str, list[str]]:
    """Return the modules that each module of a nest calls."""
    return {
        name: [str(node.target) for node in inner.graph.find_nodes(op="call_module")]
        for name, inner in module.named_modules()
        if hasattr(inner, "graph")
    }


def test_modules_are_called_as_the_model_calls_them() -> None:
    graph = flat_graph(Model(), torch.randn(2, SIZE))
    outlined = calls(_outline_submodules(graph))
    assert outlined[""] == calls(torch_unflatten._outline_submodules(graph))[""]
    assert outlined == {
        "": ["block", "block@1", "last"],
        "block": ["up", "down"],
        "block.up": [],
        "block.down": [],
        "block@1": ["up", "down"],
        "block@1.up": [],
        "block@1.down": [],
        "last": [],
    }


def test_outlining_changes_no_result() -> None:
    model, x = Model(), torch.randn(2, SIZE)
    graph = flat_graph(model, x)
    given = [*model.parameters(), x]
    expected = fx.GraphModule(nn.Module(), graph)(*given)
    torch.testing.assert_close(_outline_submodules(graph)(*given), expected)
    torch.testing.assert_close(expected, (model(x),))


def test_parameters_keep_their_names() -> None:
    model, x = Model(), torch.randn(2, SIZE)
    outlined = _outline_submodules(trace(model, x).graph)
    assert outlined.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(outlined(x), (model(x),))


def test_a_graph_that_was_traced_through_no_module_stays_unchanged() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    outlined = _outline_submodules(graph)
    assert str(outlined.graph) == str(graph)
