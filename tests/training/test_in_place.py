"""Stages that write to what the user gives them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps


class Normalize(nn.Module):
    """A first stage that normalizes its input in place, and a keyword too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x.sub_(0.5).div_(2)
        result: torch.Tensor = self.layer(x) + bias.mul_(3).T
        return result


class Scale(nn.Module):
    """A stage that writes to what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.mul_(2).tanh())
        return result


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target.add_(1))


def make_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 4, generator=generator, dtype=torch.float64),
        "bias": torch.randn(4, 8, generator=generator, dtype=torch.float64),
        "target": torch.randn(8, 4, generator=generator, dtype=torch.float64),
    }


# Microbatches were views with one version counter, and autograd refused the backward.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on import
@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled", "recorded"])
def test_a_batch_is_written_to_as_by_the_unsplit_model(family: str, how: str) -> None:
    torch.manual_seed(0)
    count = 4 if family == "ZBV" else 2
    stages: list[nn.Module] = [Normalize(), *(Scale() for _ in range(count - 1))]
    plain, expected, given = deepcopy(stages), make_values(), make_values()
    output: Any = plain[0](expected["x"], expected["bias"])
    for module in plain[1:]:
        output = module(output)
    value = loss(output, expected["target"])
    torch.autograd.backward(value)
    if how == "compiled":
        stages[0].compile(backend="aot_eager")
    pipeline = ps.Pipeline(stages, family, ranks=2, microbatches=4, loss=loss)
    if how == "checkpointed":
        for stage in pipeline._stages.values():
            stage.checkpoint()
    result = pipeline.step(
        given["x"],
        bias=ps.Along(given["bias"], 1),
        target=given["target"],
        record=how == "recorded",
    )
    assert result.loss == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        [p.grad for p in pipeline.parameters()],
        [p.grad for stage in plain for p in stage.parameters()],
        rtol=1e-12,
        atol=1e-14,
    )
