"""The helpers around a recorded graph that torch's module has, beside torch's own."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from penstock.dropin import _backward
from tests.dropin.scripts import IS_OLD_TORCH

theirs: ModuleType = pytest.importorskip("torch.distributed.pipelining._backward")


def record() -> tuple[torch.Tensor, torch.Tensor, list[nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    return x, model(x), list(model.parameters())


def test_ways_through_a_graph_are_those_that_torch_finds() -> None:
    x, output, weights = record()
    root: Any = output.grad_fn
    found: list[Any] = []
    for module in (_backward, theirs):
        nodes = [module._get_grad_fn_or_grad_acc(value) for value in (x, *weights)]
        reverse = module.construct_reverse_graph([root])
        closure, met = module.reverse_closure(nodes[:1], {root}, reverse)
        groups = module.get_param_groups(nodes[:1], nodes[1:], reverse)
        sets = [(frozenset(g["params"]), frozenset(g["intermediates"])) for g in groups]
        edges = {node: set(before) for node, before in reverse.items() if before}
        found.append((nodes, edges, closure - met, met, set(sets)))
    assert found[0] == found[1]


@pytest.mark.skipif(IS_OLD_TORCH, reason="this torch has no _autograd_grad_for_inputs")
def test_gradients_of_inputs_leave_out_what_takes_none() -> None:
    x, output, _ = record()
    given = ([output], [x, torch.ones(1), 3], [torch.ones_like(output)])
    mine, *rest = _backward._autograd_grad_for_inputs(*given, retain_graph=True)
    other, *_ = theirs._autograd_grad_for_inputs(*given, retain_graph=True)
    torch.testing.assert_close(mine, other)
    assert rest == [None, None]
    assert x.grad is None
