"""Finding the loss in what a model returns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.output_loss import find_loss
from tests.splitting.traced_models import SIZE, Layers

LOSS = torch.tensor(3.0)
LOGITS = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("output", "spec"),
    [
        (LOSS, None),
        (LOSS, True),
        ({"loss": LOSS, "logits": LOGITS}, None),
        (SimpleNamespace(loss=LOSS, logits=LOGITS), None),
        ((LOGITS, LOSS), (False, True)),
        ([LOGITS, {"a": LOSS, "b": LOGITS}], [False, {"a": True, "b": False}]),
    ],
)
def test_the_loss_is_found(output: Any, spec: Any) -> None:
    assert find_loss(output, spec=spec) is LOSS


@pytest.mark.parametrize(
    ("output", "spec", "message"),
    [
        ((LOGITS, LOSS), None, "no loss found in the output (a tuple of 2)"),
        ((LOGITS, LOSS), (False, False), "must have one True (got (False, False), with 0)"),
        ((LOSS, LOSS), (True, True), "must have one True (got (True, True), with 2)"),
        ((LOGITS, LOSS), (True, False), "a tensor of shape (2, 2)"),
        ((LOGITS, LOSS), (True,), "does not fit output, which is a tuple of 2"),
        ({"a": (LOSS,)}, {"a": {"b": True}}, "does not fit output['a']"),
    ],
)
def test_no_loss_or_several_are_refused(output: Any, spec: Any, message: str) -> None:
    with pytest.raises(ModelError) as refusal:
        find_loss(output, spec=spec)
    assert message in str(refusal.value)


class WithLoss(nn.Module):
    """A model and its loss as one model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(x), target)


def test_a_model_with_its_loss_is_split_like_any_other() -> None:
    model = WithLoss(Layers(4))
    x, y = torch.randn(4, SIZE), torch.randn(4, SIZE)
    pipe = split_traced(model, (x,), {"target": y}, stages=2)
    torch.testing.assert_close(find_loss(pipe(x, target=y)), model(x, target=y), rtol=0, atol=0)


def test_a_model_that_names_its_outputs_may_return_no_loss() -> None:
    assert find_loss(SimpleNamespace(loss=None, logits=LOGITS)) is None
    assert find_loss({"logits": LOGITS}) is None
