"""Losses and hooks that take gradients through a stage before its own backward.

These gave wrong gradients: deferred weights were constants in the graph, and the first gradient
that reached the output of a call was taken for that of the stage's own pass.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

import penstock as ps
from penstock.errors import PipelineError
from tests.models import differences, gradients_of

SPLIT_FAMILIES = ["ZB-H1", "ZB-H2", "InterleavedZeroBubble", "ZBV", "V-Half", "V-Min", "DualPipeV"]
ROWS, WIDTH, MICROBATCHES = 8, 6, 4

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Builds a loss from a model's last linear layer.
Build = Callable[[nn.Linear], Loss]


class Head(nn.Module):
    """A last stage with linear layers, and a weight without a layer.

    Both are used twice, so that an input of the second use depends on the weight. A value in
    between has a hook, which must see every gradient once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.first(x)) @ self.mix @ self.mix
        y.register_hook(lambda gradient: 0.7 * gradient)
        result: torch.Tensor = self.last(torch.tanh(y))
        return result


def _make_model(num_stages: int) -> nn.Sequential:
    torch.manual_seed(3)
    body = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages - 1)]
    return nn.Sequential(*body, Head()).double()


def _grad(loss: torch.Tensor, inputs: Any, **options: Any) -> torch.Tensor:
    found: torch.Tensor = torch.autograd.grad(loss, inputs, retain_graph=True, **options)[0]
    return found


def _size(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().sum().sqrt()


def _weigh_by_output(_layer: nn.Linear) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near, small = F.mse_loss(output, target), output.abs().mean()
        rate = _size(_grad(near, output)) / _size(_grad(small, output))
        return near + rate.detach() * small

    return loss


def _weigh_by_weight(layer: nn.Linear) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near, small = F.mse_loss(output, target), output.abs().mean()
        rate = _size(_grad(near, layer.weight)) / _size(_grad(small, layer.weight))
        return near + rate.detach() * small

    return loss


def _weigh_by_unused_weight(layer: nn.Linear) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = F.mse_loss(output, target)
        found = _grad(near, layer.weight, allow_unused=True, materialize_grads=True)
        return near * (1 + found.abs().sum().detach())

    return loss


def _penalise_weight_gradient(layer: nn.Linear) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = F.mse_loss(output, target)
        return near + _grad(near, layer.weight, create_graph=True).square().sum()

    return loss


def _penalise_later(layer: nn.Linear) -> Loss:
    penalised, calls = _penalise_weight_gradient(layer), list[int]()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        is_on = len(calls) > MICROBATCHES + 2
        return penalised(output, target) if is_on else F.mse_loss(output, target)

    return loss


def _backward_inside(layer: nn.Linear) -> Loss:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = F.mse_loss(output, target)
        for _ in range(2):
            torch.autograd.backward(near, inputs=list(layer.parameters()), retain_graph=True)
        return near

    return loss


def _backward_through_everything(_layer: nn.Linear) -> Loss:
    """Run a backward whose gradients stay in `.grad`, in the stages before the last one too."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = F.mse_loss(output, target)
        torch.autograd.backward(near, retain_graph=True)
        return near

    return loss


def _hook_inside(layer: nn.Linear) -> Loss:
    """Add a hook that takes gradients through the stage while its own pass runs."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = F.mse_loss(output, target)
        small = output.square().sum()
        is_inside: list[bool] = []

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            if is_inside:
                return gradient
            is_inside.append(True)
            return gradient * (1 + _size(_grad(small, layer.weight)))

        output.register_hook(scale)  # type: ignore[no-untyped-call]  # untyped upstream
        return near

    return loss


LOSSES: dict[str, Build] = {
    "gradients of the output": _weigh_by_output,
    "gradients of a weight": _weigh_by_weight,
    "gradients of a weight that may be unused": _weigh_by_unused_weight,
    "a penalty on a weight's gradient": _penalise_weight_gradient,
    "a penalty that comes later": _penalise_later,
    "backward twice inside": _backward_inside,
    "backward through everything": _backward_through_everything,
    "a hook in the own pass": _hook_inside,
}


def _expected(
    model: nn.Sequential, build: Build, batch: torch.Tensor, target: torch.Tensor
) -> float:
    """Train the unsplit model by microbatches, because such losses are not means over rows."""
    loss, total = build(model[-1].last), 0.0  # type: ignore[arg-type]  # a Head
    for _ in range(2):
        total = 0.0
        for x, y in zip(batch.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            one = loss(model(x), y) / MICROBATCHES
            torch.autograd.backward(one)
            total += one.item()
    return total


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("family", ["1F1B", *SPLIT_FAMILIES])
def test_gradients_are_exact_whatever_the_loss_differentiates(family: str, name: str) -> None:
    stages = 2 if family in ("1F1B", "ZB-H1", "ZB-H2") else 4
    model = _make_model(stages)
    plain = deepcopy(model)
    batch, target = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, 3).double()
    expected = _expected(plain, LOSSES[name], batch, target)
    loss = LOSSES[name](model[-1].last)  # type: ignore[arg-type]  # a Head
    pipeline = ps.Pipeline(
        list(model), family, ranks=2, microbatches=MICROBATCHES, loss=loss, reduction="mean"
    )
    pipeline.step(batch, target=target)
    result = pipeline.step(batch, target=target)
    assert result.loss == pytest.approx(expected, rel=1e-12)
    found = gradients_of(model.named_parameters())
    assert differences(found, gradients_of(plain.named_parameters())) == {}


def test_a_stage_may_differentiate_itself_from_some_step_on() -> None:
    """Switch on forces of an energy after the first step, in a stage in the middle."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.has_forces = nn.Linear(WIDTH, WIDTH), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            if not self.has_forces:
                return y
            (force,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
            return y + force

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Energy(), nn.Linear(WIDTH, 3)).double()
    plain = deepcopy(model)
    batch, target = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, 3).double()
    pipeline = ps.Pipeline(list(model), "ZB-H1", microbatches=MICROBATCHES, loss=F.mse_loss)
    for has_forces in (False, True):
        for energy in (model[1], plain[1]):
            energy.has_forces = has_forces  # type: ignore[assignment]  # an Energy
        pipeline.step(batch, target=target)
        torch.autograd.backward(F.mse_loss(plain(batch), target))
    found = gradients_of(model.named_parameters())
    assert differences(found, gradients_of(plain.named_parameters())) == {}


def test_a_backward_that_the_loss_undoes_in_the_last_stage_only_is_refused() -> None:
    # The gradient at the last stage's input would still reach the stages before it.
    model = _make_model(2)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = F.mse_loss(output, target)
        before = [(parameter, parameter.grad) for parameter in model[-1].parameters()]
        torch.autograd.backward(near, retain_graph=True)
        for parameter, gradient in before:
            parameter.grad = gradient
        return near

    pipeline = ps.Pipeline(list(model), "1F1B", microbatches=2, loss=loss)
    with pytest.raises(PipelineError, match="removed its gradients in the last stage only"):
        pipeline.step(torch.ones(4, WIDTH).double(), target=torch.ones(4, 3).double())
