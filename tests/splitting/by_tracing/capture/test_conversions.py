"""Modules that convert themselves in their forward are traced where that changes nothing."""

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_tracing.traced import split_traced
from tests.splitting.traced_models import SIZE

X = torch.randn(4, SIZE)


class Converting(nn.Module):
    """A model whose last layer is to have a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        self.layers[1] = self.layers[1].to(self.dtype)
        result: torch.Tensor = self.layers[1](x.to(self.dtype))
        return result


def test_a_conversion_to_the_same_type_is_left_out() -> None:
    # The router of Switch Transformers does so; torch could not swap a weight of a trace.
    model = Converting(torch.float32)
    pipe = split_traced(model, (X,), stages=2)
    torch.testing.assert_close(pipe(X), model(X))
    assert "_apply" not in model.layers[1].__dict__
    assert model.double().layers[0].weight.dtype == torch.float64


def test_another_conversion_is_refused() -> None:
    with pytest.raises(ModelError) as refusal:
        split_traced(Converting(torch.float64), (X,), stages=2)
    assert str(refusal.value) == (
        "a model that is traced must not convert its modules (it converts 'layers.1.weight' from "
        "torch.float32 on cpu to torch.float64 on cpu); run it once before it is split, convert "
        "it yourself, or split it by layers"
    )
