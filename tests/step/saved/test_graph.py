"""Packing what a graph holds."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import Node, save_on_cpu
from torch.utils.checkpoint import checkpoint

from penstock.deferred.calls import DeferredCalls, current_recording
from penstock.deferred.linear import DeferredLinear, held_by
from penstock.step.overlap.collectives import CollectiveTurns
from penstock.step.saved import graph
from penstock.step.saved.graph import PackedGraph, pack_graph


def node_of(output: torch.Tensor) -> Node:
    assert output.grad_fn is not None
    return output.grad_fn


def move(packed: PackedGraph) -> int:
    """Take what is packed away and bring it back; return its bytes."""
    copies = [memory.clone() for memory in packed.bytes]
    packed.leave()
    packed.come_back(copies)
    return sum(copy.nbytes for copy in copies)


def chain(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return (y * y.exp()).view(2, 6).t().tanh().sum()


def joined(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.exp(), x[1:] * 2, x[1:]]).square().sum()


def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x.cos())
    return (z * z.conj()).abs().sum() + (z @ z.conj().T).abs().sum()


@pytest.mark.parametrize("function", [chain, joined, complex_numbers])
def test_a_graph_that_was_away_gives_the_same_gradients(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    (expected,) = torch.autograd.grad(function(x), x)
    output = function(x)
    assert move(pack_graph([node_of(output)], [x], set())) > 0
    (found,) = torch.autograd.grad(output, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# Torch gives a mode such a number as one of Python, and could not detach that to pack it.
def test_numbers_of_the_code_stay_where_they_are() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    y = (x * 0.9).sum()
    with CollectiveTurns().watching():
        assert move(pack_graph([node_of(y)], [], set())) == 0
    torch.autograd.backward(y)
    assert x.grad is not None
    assert x.grad.tolist() == [0.9] * 4


def test_each_piece_of_memory_is_moved_once_and_parameters_stay() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(8, 4)
    y = (x @ weight).relu()
    output = (y * y + y[2:].sum() * y.exp()).sum()
    packed = pack_graph([node_of(output)], [], {weight.untyped_storage().data_ptr()})
    sizes = sorted(memory.nbytes for memory in packed.bytes)
    # What is saved: x, y, and its exponential; the sum of some of its rows is a number and stays.
    assert sizes == [8 * 4 * 4, 8 * 4 * 4, 8 * 4 * 4]


def test_what_others_decide_about_stays_with_them() -> None:
    x = torch.randn(4, 4, requires_grad=True)

    def square(value: torch.Tensor) -> torch.Tensor:
        return value.sin().exp()

    inside = checkpoint(square, x, use_reentrant=False)
    with save_on_cpu():
        output = inside.cos().sum()
    (expected,) = torch.autograd.grad(output, x, retain_graph=True)
    packed = pack_graph([node_of(output)], [], {x.untyped_storage().data_ptr()})
    assert packed.bytes == []
    (found,) = torch.autograd.grad(output, x)
    torch.testing.assert_close(found, expected)


class Deferring:
    """A linear layer as in a stage that splits its backward, after a forward and before it leaves.

    Its input has a place in the graph: the gradient of `x` goes through it.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = DeferredLinear(4, 3)
        self.x = torch.randn(5, 4, requires_grad=True)
        self.value = self.x.sin()
        token = current_recording.set(DeferredCalls(set(), set()))
        self.output = layer(self.value)
        current_recording.reset(token)
        self.tensors = [self.x, *layer.parameters()]
        self.wanted = [
            gradient.clone()
            for gradient in torch.autograd.grad(self.output.sum(), self.tensors, retain_graph=True)
        ]

    @property
    def held(self) -> torch.Tensor:
        """The input that the layer's node holds."""
        held = held_by(node_of(self.output))
        assert held is not None
        return held[0]

    def assert_same(self) -> None:
        """Check that the graph still gives what it gave before."""
        assert self.held.grad_fn is self.value.grad_fn
        torch.testing.assert_close(self.held, self.value, rtol=0, atol=0)
        found = torch.autograd.grad(self.output.sum(), self.tensors)
        for gradient, wanted in zip(found, self.wanted, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_input_of_a_deferred_call_returns_to_its_place_in_the_graph(is_enabled: bool) -> None:
    # Where gradients were off, packing ended in "StopIteration:".
    call = Deferring()
    with torch.set_grad_enabled(is_enabled):
        packed = pack_graph([node_of(call.output)], [], {call.x.untyped_storage().data_ptr()})
        assert move(packed) == call.value.nbytes
    call.assert_same()


def test_a_place_in_the_graph_is_kept_by_a_tensor_until_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In torch 2.11 the node alone had nothing saved any more, and packing ended in
    # "StopIteration:". Later versions let a node live as long as someone holds it.
    outputs: list[weakref.ref[torch.Tensor]] = []
    apply: Any = graph._Hold.apply

    def note(value: torch.Tensor) -> Any:
        output = apply(value)
        outputs.append(weakref.ref(output))
        return output

    monkeypatch.setattr(graph._Hold, "apply", note)
    call = Deferring()
    packed = pack_graph([node_of(call.output)], [], set())
    copies = [memory.clone() for memory in packed.bytes]
    packed.leave()
    assert [output() is not None for output in outputs] == [True]
    packed.come_back(copies)
    assert [output() is not None for output in outputs] == [False]
    call.assert_same()
