"""Pieces of a traced graph, between the places where the fewest bytes are alive."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.splitting.by_tracing.capture.capture import capture
from penstock.splitting.by_tracing.cut.pieces import GraphPiece, estimate_work, graph_pieces
from tests.splitting.traced_models import Layers

WIDTH = 64


def pieces_of(model: nn.Module, *args: Any, stages: int = 4) -> tuple[GraphPiece, ...]:
    return graph_pieces(capture(model, args, {}, dynamic=True), stages)


def test_pieces_begin_where_only_one_value_is_alive() -> None:
    x = torch.randn(4, WIDTH)
    pieces = pieces_of(Layers(8, WIDTH), x)
    assert {piece.crossing_bytes for piece in pieces} == {x.numel() * x.element_size()}
    assert [piece.name for piece in pieces] == [f"layers.{i}.0" for i in range(8)]


def test_the_work_of_pieces_is_that_of_the_model() -> None:
    rows, layers = 4, 8
    pieces = pieces_of(Layers(layers, WIDTH), torch.randn(rows, WIDTH))
    products = layers * 2 * (rows * WIDTH * 4 * WIDTH)
    assert sum(piece.operations for piece in pieces) == 2 * products
    whole = sum(p.numel() * p.element_size() for p in Layers(layers, WIDTH).parameters())
    assert sum(piece.parameter_bytes for piece in pieces) == whole


def test_equal_layers_weigh_the_same() -> None:
    weights = {estimate_work(p) for p in pieces_of(Layers(8, WIDTH), torch.randn(4, WIDTH))}
    assert len(weights) == 1


@pytest.mark.parametrize("stages", [2, 5, 16])
def test_there_are_enough_pieces_for_the_stages(stages: int) -> None:
    assert len(pieces_of(Layers(16, WIDTH), torch.randn(4, WIDTH), stages=stages)) >= stages


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def test_convolutions_and_attention_are_counted() -> None:
    pieces = pieces_of(Convolutions(), torch.randn(2, 3, 5, 5))
    outputs = 2 * 8 * 5 * 5
    assert sum(p.operations for p in pieces) == 2 * outputs * 9 * 3 + 2 * outputs * 9 * 4

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v)

    found = pieces_of(Attention(), *(torch.randn(2, 3, n, 8) for n in (5, 7, 7)), stages=1)
    assert sum(piece.operations for piece in found) == 2 * 2 * (2 * 3 * 5 * 7 * 8)
