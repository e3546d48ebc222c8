"""The places of tensors in their graphs, and the pass that a stage runs from them."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from penstock.deferred.own_pass import find_edge, run_backward


class Twice(torch.autograd.Function):
    """A node of a Python function, which only its output keeps alive."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return 2 * value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return 2 * gradient


def outputs_of(leaf: torch.Tensor) -> dict[str, torch.Tensor]:
    twice: torch.Tensor = Twice.apply(leaf)  # type: ignore[no-untyped-call]  # untyped upstream
    return {"leaf": leaf, "operation": 3 * leaf, "second": leaf.unbind()[1], "function": twice}


@pytest.mark.parametrize("kind", ["leaf", "operation", "second", "function"])
def test_edge_of_a_tensor_is_the_one_that_torch_finds(kind: str) -> None:
    output = outputs_of(torch.ones(2, requires_grad=True))[kind]
    mine, other = find_edge(output), get_gradient_edge(output)
    assert (mine.node, mine.output_nr) == (other.node, other.output_nr)


@pytest.mark.parametrize(("kind", "expected"), [("operation", 3.0), ("function", 2.0)])
def test_backward_runs_from_an_edge_whose_tensor_is_gone(kind: str, expected: float) -> None:
    leaf, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    edge = find_edge(outputs_of(leaf)[kind])
    found = run_backward([(edge, torch.ones(2))], [leaf, unused])
    assert [gradient.tolist() for gradient in found] == [[expected, expected], [0.0]]
    assert (leaf.grad, unused.grad) == (None, None)
