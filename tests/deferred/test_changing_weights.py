"""Weights that are normed, pruned, lazy, replaced or unfrozen, with a split backward."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import penstock as ps
from tests.models import differences, gradients_of

ROWS, WIDTH, MICROBATCHES = 8, 6, 4
# Untyped upstream.
PRUNE: Any = prune
Change = Callable[[Any], object]


def _make_model(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers).double()


def _compare(model: nn.Sequential, plain: nn.Sequential, changes: list[Change]) -> None:
    """Run a step before and after every change, and compare all gradients at the end."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    stages = [model[:-1], model[-1:]]
    pipeline = ps.Pipeline(stages, "ZB-H1", microbatches=MICROBATCHES, loss=F.mse_loss)
    for change in [lambda _: None, *changes]:
        for one in (model, plain):
            torch.manual_seed(7)
            with torch.no_grad():
                change(one)
        pipeline.step(batch, target=target)
        for x, y in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            torch.autograd.backward(F.mse_loss(plain(x), y) / MICROBATCHES)
    found = gradients_of(model.named_parameters())
    assert differences(found, gradients_of(plain.named_parameters())) == {}


@pytest.mark.parametrize(
    "change",
    [
        # The strides or the shape change but the address stays, so checking it was not enough.
        lambda m: setattr(m[1].weight, "data", m[1].weight.data.t()),
        lambda m: setattr(m[1].weight, "data", torch.randn(WIDTH, WIDTH).double()),
        lambda m: setattr(m[1], "weight", nn.Parameter(torch.randn(WIDTH, WIDTH).double())),
        lambda m: m[1].weight.mul_(2),
        lambda m: m[1].requires_grad_(False),
        # Layers whose weight is no longer a parameter raised KeyError: 'weight'.
        lambda m: PRUNE.l1_unstructured(m[1], "weight", amount=0.5),
        lambda m: PRUNE.random_unstructured(m[1], "bias", amount=0.5),
        lambda m: parametrizations.weight_norm(m[1]),
        lambda m: parametrizations.orthogonal(m[1]),
    ],
    ids=[
        "transposed", "other_data", "other_parameter", "in_place", "frozen", "pruned",
        "pruned_bias", "normed", "orthogonal",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_a_weight_may_change_between_steps(change: Change) -> None:
    model = _make_model()
    _compare(model, deepcopy(model), [change])


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        spectral_norm,
        lambda layer: PRUNE.l1_unstructured(layer, "weight", amount=0.5),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
    ids=[
        "weight_norm",
        "spectral_norm",
        "pruned",
        "weight_norm_parametrized",
        "spectral_parametrized",
    ],
)
def test_a_layer_may_be_normed_or_pruned_beforehand(
    norm: Callable[[Any], Any],
) -> None:
    models = []
    for _ in range(2):
        model = _make_model()
        torch.manual_seed(9)
        norm(model[1])
        models.append(model)
    _compare(models[0], models[1], [])


def test_a_lazy_layer_is_deferred_once_its_shape_is_known() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        middle = nn.LazyLinear(WIDTH).double()
        models.append(_make_model(middle))
    # Lazy modules initialise their weights in their first forward.
    for model in models:
        torch.manual_seed(11)
        model(torch.randn(1, WIDTH).double())
    _compare(models[0], models[1], [lambda _: None])


def test_a_pipeline_may_consist_of_lazy_layers() -> None:
    # Reading the size of a weight that was not initialised yet raised a bare ValueError.
    stages = [nn.LazyLinear(WIDTH), nn.LazyLinear(3)]
    pipeline = ps.Pipeline(stages, "ZB-H1", microbatches=2, loss=F.mse_loss)
    result = pipeline.step(torch.ones(4, WIDTH), target=torch.ones(4, 3))
    assert result.loss is not None
    assert all(p.grad is not None for stage in stages for p in stage.parameters())


class _Turned(torch.autograd.Function):
    """A product with a transposed weight, inside a function that records no graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class _Raw(nn.Module):
    """A weight that no layer owns, and a function of it and the input."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    "function",
    [
        # A view made without a graph does not lead back to its weight.
        lambda x, w: _Turned.apply(x, w),  # type: ignore[no-untyped-call]  # untyped upstream
        lambda x, w: checkpoint(lambda y: F.linear(y, w.t()), x, use_reentrant=True),
        lambda x, w: F.linear(F.linear(x, w), w.t()),
    ],
    ids=["custom_function", "reentrant_checkpoint", "both_ways"],
)
def test_views_of_weights_work_where_no_graph_is_recorded(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    model = _make_model(_Raw(function))
    _compare(model, deepcopy(model), [])


class _Force(nn.Module):
    """The derivative of an energy with respect to the output of a layer of the same stage."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.entry(x)
        (force,) = torch.autograd.grad(torch.tanh(self.layer(h)).sum(), h, create_graph=True)
        return h - 0.5 * force


def test_a_stage_may_differentiate_from_the_output_of_a_layer() -> None:
    model = _make_model(_Force())
    _compare(model, deepcopy(model), [])


class _Writing(nn.Module):
    """A module that writes to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.9)
        result: torch.Tensor = self.layer(x)
        return result


@pytest.mark.parametrize("family", ["GPipe", "ZB-H1"])
def test_a_stage_that_writes_to_its_input_may_follow_one_that_is_unfrozen(family: str) -> None:
    # Writes were noticed only for inputs that required a gradient in the first step.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Writing()).double()
    plain = deepcopy(model)
    x, y = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, 3).double()
    pipeline = ps.Pipeline(list(model), family, microbatches=2, loss=F.mse_loss)
    for trains_first in (False, True):
        for one in (model, plain):
            one[0].requires_grad_(trains_first)
        pipeline.step(x, target=y)
        torch.autograd.backward(F.mse_loss(plain(x), y))
    found = gradients_of(model.named_parameters())
    assert differences(found, gradients_of(plain.named_parameters())) == {}


def test_a_pipeline_names_the_weights_that_are_not_deferred() -> None:
    model = _make_model(nn.GRUCell(WIDTH, WIDTH))
    model[1].weight.register_hook(lambda gradient: gradient)  # type: ignore[operator]  # a Linear
    stages = [model[:-1], model[-1:]]
    pipeline = ps.Pipeline(stages, "ZB-H1", microbatches=2, loss=F.mse_loss)
    pipeline.step(torch.ones(4, WIDTH).double(), target=torch.ones(4, 3).double())
    assert pipeline.undeferred_weights == {0: ["1.weight", "2.weight_ih", "2.weight_hh"]}
    assert repr(pipeline).endswith("on cpu, 3 weights finished in I>")


def test_a_schedule_with_whole_backwards_names_no_weights() -> None:
    pipeline = ps.Pipeline(list(_make_model()), "1F1B", microbatches=2, loss=F.mse_loss)
    pipeline.step(torch.ones(4, WIDTH).double(), target=torch.ones(4, 3).double())
    assert pipeline.undeferred_weights == {}
