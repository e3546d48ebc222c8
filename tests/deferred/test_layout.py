"""Gradients of a product's input lie in memory as autograd lays them out."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from tests.deferred.halves import Apply, assert_same, random_values, run_plain, run_split

WIDTH = 6

ARRANGEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x * 2,
    "columns": lambda x: (x.mT * 2).contiguous().mT,
    "first two swapped": lambda x: (x.transpose(0, 1) * 2).contiguous().transpose(0, 1),
    "part of larger rows": lambda x: torch.cat([x, x], dim=-1)[..., :WIDTH],
}
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by rows": lambda y: y.sin(),
    "by columns": lambda y: (y.mT * 3).contiguous().mT * torch.ones_like(y.mT.contiguous().mT),
    "one number": lambda y: y.sum(),
}
PRODUCTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "layer": lambda m, x: m.layer(x),
    "layer without bias": lambda m, x: m.bare(x),
    "linear": lambda m, x: F.linear(x, m.layer.weight, m.layer.bias),
    "product": lambda m, x: x @ m.layer.weight,
    "product with a transposed weight": lambda m, x: x @ m.layer.weight.t(),
}
MATRIX_PRODUCTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "addmm": lambda m, x: torch.addmm(m.layer.bias, x, m.layer.weight),
    "product from the left": lambda m, x: m.layer.weight @ x,
}


def layers() -> dict[str, nn.Module]:
    return {"layer": nn.Linear(WIDTH, WIDTH), "bare": nn.Linear(WIDTH, WIDTH, bias=False)}


def compare_layouts(
    product: Callable[[Any, torch.Tensor], torch.Tensor],
    arrange: Callable[[torch.Tensor], torch.Tensor],
    finish: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
) -> None:
    def apply(m: Any, x: torch.Tensor) -> torch.Tensor:
        value = arrange(x)
        value.register_hook(lambda g: strides.append(g.stride()))  # type: ignore[no-untyped-call]  # untyped upstream
        return finish(product(m, value))

    strides: list[tuple[int, ...]] = []
    torch.manual_seed(0)
    plain = Apply(apply, **layers()).double()
    split = deepcopy(plain)
    values = random_values(*shape)
    expected = run_plain(plain, values)
    known, strides = strides, []
    assert_same(run_split(split, values), expected)
    # The stride of a dimension of size 1 says nothing.
    assert [_told(each, shape) for each in strides] == [_told(each, shape) for each in known]


def _told(strides: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    return [stride for stride, size in zip(strides, shape, strict=True) if size > 1]


@pytest.mark.parametrize("finish", GRADIENTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_of_inputs_lie_as_with_autograd(
    product: str, arrangement: str, finish: str
) -> None:
    for shape in ((1, 4, WIDTH), (3, 4, WIDTH)):
        compare_layouts(PRODUCTS[product], ARRANGEMENTS[arrangement], GRADIENTS[finish], shape)


@pytest.mark.parametrize("finish", GRADIENTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("product", PRODUCTS | MATRIX_PRODUCTS)
def test_gradients_of_matrices_lie_as_with_autograd(
    product: str, arrangement: str, finish: str
) -> None:
    known = PRODUCTS | MATRIX_PRODUCTS
    shape = (WIDTH, WIDTH) if product == "product from the left" else (4, WIDTH)
    compare_layouts(known[product], ARRANGEMENTS[arrangement], GRADIENTS[finish], shape)


# Torch's batch norm on a CPU has wrong gradients where its input and the gradient of its output
# lie in memory in different orders. CvT was exact under 1F1B and off by 1e-4 under ZBV.
def test_batch_norm_before_a_layer_has_the_gradients_of_the_unsplit_model() -> None:
    def apply(m: Any, x: torch.Tensor) -> torch.Tensor:
        normed = m.norm(m.mix(x))
        output: torch.Tensor = m.layer(normed.flatten(2).mT)
        return output.sin()

    torch.manual_seed(0)
    parts = {"mix": nn.Conv2d(WIDTH, WIDTH, 1, groups=WIDTH), "norm": nn.BatchNorm2d(WIDTH)}
    plain = Apply(apply, **parts, **layers()).double().eval()
    split = deepcopy(plain)
    values = random_values(1, WIDTH, 2, 3)
    assert_same(run_split(split, values), run_plain(plain, values))
