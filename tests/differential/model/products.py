"""Raw parameters in products: by every function, as views, twice, and beside other uses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from tests.differential.case import WIDTH

__all__ = ["PRODUCTS"]

# From an activation and a weight to an activation.
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Raw(nn.Module):
    """A weight of this shape, and what is made of it."""

    def __init__(self, product: Product, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / WIDTH**0.5)
        self._product = product

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self._product(h, self.weight)


def _bmm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = h.reshape(-1, 1, WIDTH)
    return torch.bmm(rows, weight.expand(rows.shape[0], -1, -1)).view_as(h)


def _addmm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.addmm(weight[0], h.reshape(-1, WIDTH), weight).view_as(h)


def _halves(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = weight.chunk(2)
    return F.linear(h, first) + torch.tanh(F.linear(h, second))


def _broadcast_einsum(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sequence = h if h.dim() == 3 else h.unsqueeze(1)
    return torch.einsum("btw,twv->btv", sequence, weight).view_as(h)


def _convolve(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    sequence = h if h.dim() == 3 else h.unsqueeze(1)
    made = F.conv1d(sequence.transpose(1, 2), weight, padding="same")
    return made.transpose(1, 2).reshape(h.shape)


def _look_up(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    numbers = (h.detach().sum(-1).abs() * 3).long() % WIDTH
    return h * 0.5 + weight[numbers] + F.embedding(numbers, weight)


def _no_gradient(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        constant = F.linear(h, weight)
    return F.linear(h, weight) + 0.1 * constant + F.linear(h.detach(), weight)


_PRODUCTS: dict[str, tuple[Product, tuple[int, ...]]] = {
    "matmul": (lambda h, w: h @ w, (WIDTH, WIDTH)),
    "transposed": (lambda h, w: h @ w.t(), (WIDTH, WIDTH)),
    "functional": (lambda h, w: F.linear(h, w), (WIDTH, WIDTH)),
    "weight_view": (lambda h, w: F.linear(h, w.view(WIDTH, WIDTH)), (WIDTH * WIDTH,)),
    "weight_slice": (lambda h, w: F.linear(h, w[1, :, 1:]), (2, WIDTH, WIDTH + 1)),
    "weight_halves": (_halves, (2 * WIDTH, WIDTH)),
    "bmm": (_bmm, (1, WIDTH, WIDTH)),
    "addmm": (_addmm, (WIDTH, WIDTH)),
    "einsum": (lambda h, w: torch.einsum("...w,vw->...v", h, w), (WIDTH, WIDTH)),
    "einsum_heads": (
        lambda h, w: torch.einsum("...w,whd->...hd", h, w).flatten(-2),
        (WIDTH, 2, WIDTH // 2),
    ),
    "einsum_broadcast": (_broadcast_einsum, (1, WIDTH, WIDTH)),
    "tensordot": (lambda h, w: torch.tensordot(h, w, dims=([-1], [0])), (WIDTH, WIDTH)),
    "matrix_vector": (lambda h, w: h * (h @ w).unsqueeze(-1), (WIDTH,)),
    "conv_functional": (_convolve, (WIDTH, WIDTH, 3)),
    "scaled_weight": (lambda h, w: F.linear(h, w * 0.5), (WIDTH, WIDTH)),
    "normalized_weight": (lambda h, w: F.linear(h, F.normalize(w)), (WIDTH, WIDTH)),
    "elementwise": (lambda h, w: h * w[0] + w[1], (2, WIDTH)),
    "product_and_penalty": (
        lambda h, w: F.linear(h, w) + 0.01 * w.square().sum(),
        (WIDTH, WIDTH),
    ),
    "product_twice": (lambda h, w: F.linear(F.linear(h, w), w.t()), (WIDTH, WIDTH)),
    "table": (_look_up, (WIDTH, WIDTH)),
    "no_gradient": (_no_gradient, (WIDTH, WIDTH)),
    "cast_weight": (lambda h, w: F.linear(h, w.to(h.dtype).contiguous()), (WIDTH, WIDTH)),
    "alternating": (
        lambda h, w: F.linear(h, w) if h.shape[0] % 2 else F.linear(h, w) * w[0],
        (WIDTH, WIDTH),
    ),
    "vmapped": (lambda h, w: torch.func.vmap(lambda row: F.linear(row, w))(h), (WIDTH, WIDTH)),
}


def _maker(product: Product, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    def make(*_: Any) -> nn.Module:
        return Raw(product, *shape)

    return make


PRODUCTS = {name: _maker(*settings) for name, settings in _PRODUCTS.items()}
