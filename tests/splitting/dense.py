"""A model whose layers read everything before them, and two ways to split it."""

from typing import Literal, TypeAlias

import torch
from torch import nn

import penstock as ps
from penstock.splitting.marks import SplitPoint
from penstock.splitting.pipe import Pipe
from tests.splitting.small import WIDTH

__all__ = ["LAYERS", "Dense", "Reading", "Way", "split_dense"]

LAYERS = 8
Way: TypeAlias = Literal["layers", "traced"]


class Reading(nn.Module):
    """A layer that reads what all layers before it have returned, and which rows count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, counts: torch.Tensor, *earlier: torch.Tensor) -> torch.Tensor:
        x = earlier[0]
        for other in earlier[1:]:
            x = x * 0.9 + other
        return torch.tanh(self.linear(x)) * counts


class Counting(nn.Module):
    """Says which rows count, as a value that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor(-10.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least = self.least
        assert isinstance(least, torch.Tensor)
        return (x.sum(1, keepdim=True) > least).to(x.dtype)


class Dense(nn.Module):
    """Every layer reads the embedding and all that earlier layers have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.counting = Counting()
        self.layers = nn.ModuleList(Reading() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = self.counting(x)
        found = [self.embed(x)]
        for layer in self.layers:
            found.append(layer(counts, *found))
        result: torch.Tensor = self.head(found[-1])
        return result


def split_dense(model: nn.Module, way: Way, stages: int, example: torch.Tensor) -> Pipe:
    """Cut the model into stages with as many layers each."""
    if way == "layers":
        return ps.split(model, layers="layers", stages=stages, example=[example])
    step = LAYERS // stages
    cuts = {f"layers.{n}": SplitPoint.BEGINNING for n in range(step, LAYERS, step)}
    return ps.split(model, at=cuts, example=[example])
