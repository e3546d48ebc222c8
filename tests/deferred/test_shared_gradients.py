"""Gradients that autograd puts into the same memory as those of a parameter."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from penstock.deferred.own_pass import run_backward


def tokens_first(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1) + p.unsqueeze(1)


def flat(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return x.view(-1) + p.view(-1)


# Autograd gives the input and the parameter one memory for their gradients, because neither view
# of the sum's gradient knows of the other. The next microbatch adds to the parameter's in place,
# while the input's may still wait to be sent.
@pytest.mark.parametrize("add", [tokens_first, flat])
def test_what_is_sent_back_does_not_change_with_the_next_microbatch(
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    positions = nn.Parameter(torch.randn(5, 3))
    sent = []
    for number in range(2):
        x = torch.randn(1, 5, 3, requires_grad=True)
        y = add(x, positions)
        gradient = torch.full_like(y, number + 1.0)
        (found,) = run_backward([(get_gradient_edge(y), gradient)], [x])
        sent.append(found)
    assert [float(found.mean()) for found in sent] == [1.0, 2.0]
    assert positions.grad is not None
    assert float(positions.grad.mean()) == 3.0
