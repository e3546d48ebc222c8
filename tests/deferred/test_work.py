"""Deferred work is added to a whole gradient, or to the part that a view shows."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.deferred.work import WeightPart

SHAPE = (3, 4, 5)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda w: w,
    "one_of_a_stack": lambda w: w[1],
    "transposed": lambda w: w.mT,
    "one_transposed": lambda w: w[2].t(),
    "turned": lambda w: w.permute(2, 0, 1),
    "slice": lambda w: w[1:, ::2, 1:4],
    "flat": lambda w: w.view(12, 5),
    "narrow": lambda w: w.narrow(1, 2, 2),
}


def _held(kind: str, weight: torch.Tensor) -> torch.Tensor | None:
    match kind:
        case "nothing":
            return None
        case "contiguous":
            return torch.randn_like(weight)
        case "turned":
            return torch.randn(5, 4, 3, dtype=weight.dtype).permute(2, 1, 0)
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("held", ["nothing", "contiguous", "turned"])
@pytest.mark.parametrize("offset", [0, 7])
def test_a_part_gets_the_gradient_that_autograd_adds(view: str, held: str, offset: int) -> None:
    torch.manual_seed(0)
    memory = torch.randn(100, dtype=torch.float64)
    weight = nn.Parameter(memory[offset : offset + 60].view(SHAPE))
    before = _held(held, weight)
    weight.grad = None if before is None else before.clone()
    shown = VIEWS[view](weight)
    gradient = torch.randn(shown.shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(shown, weight, gradient)
    WeightPart(weight, shown.detach()).add(gradient)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected + (0 if before is None else before))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("held", ["nothing", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_product_is_added_to_a_part_in_the_dtype_of_the_weight(
    view: str, held: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(SHAPE, dtype=torch.float64))
    before = _held(held, weight)
    weight.grad = None if before is None else before.clone()
    shown = VIEWS[view](weight)
    rows = torch.randn(*shown.shape[:-1], 6, dtype=dtype)
    columns = torch.randn(*shown.shape[:-2], 6, shown.shape[-1], dtype=dtype)
    (expected,) = torch.autograd.grad(shown, weight, (rows @ columns).double())
    WeightPart(weight, shown.detach()).add_product(rows, columns)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected + (0 if before is None else before))
