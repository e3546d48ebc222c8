"""Products with weights on a CUDA device; `test_weight.py` has the same on the processor."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from tests.deferred.halves import Apply, Gradients, run_plain, run_split, waiting_weights

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 64, 256


class Experts(nn.Module):
    """Rows in groups, each with its own two matrices, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([16, 16, 100, ROWS], dtype=torch.int32, device=x.device)
        return F.grouped_mm(F.grouped_mm(x, self.up, offs=ends).tanh(), self.down.mT, offs=ends)


def _words(m: Any, x: torch.Tensor) -> Any:
    words = (x[:, 0].double().abs() * 20).long() % 32
    return F.linear(m.words(words).tanh(), m.words.weight)


MODULES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "conv": (
        lambda: Apply(
            lambda m, x: m.g(m.f(x.view(2, WIDTH, -1)).tanh()),
            f=nn.Conv1d(WIDTH, WIDTH, 3),
            g=nn.ConvTranspose1d(WIDTH, WIDTH, 3),
        ),
        {"f.weight", "g.weight"},
    ),
    "words": (lambda: Apply(_words, words=nn.Embedding(32, WIDTH)), {"words.weight"}),
    "attention": (
        lambda: Apply(
            lambda m, x: m.a(*[x.view(2, -1, WIDTH)] * 3)[0], a=nn.MultiheadAttention(WIDTH, 4)
        ),
        {"a.in_proj_weight", "a.out_proj.weight"},
    ),
    "grouped_experts": (Experts, {"up", "down"}),
}


def _flat(gradients: Gradients) -> torch.Tensor:
    found = [gradient for gradient in gradients.parameters.values() if gradient is not None]
    return torch.cat([gradient.double().flatten() for gradient in found])


@pytest.mark.parametrize("name", MODULES)
def test_the_halves_on_a_device_are_as_exact_as_the_whole(name: str) -> None:
    torch.manual_seed(0)
    build, waiting = MODULES[name]
    module = build().cuda().bfloat16()
    values = [torch.randn(ROWS, WIDTH, device="cuda").bfloat16() for _ in range(4)]
    plain = _flat(run_plain(copy.deepcopy(module), values))
    split = _flat(run_split(module, values))
    # Both round sums of four microbatches to bfloat16.
    assert float((split - plain).norm() / plain.norm()) < 2**-7
    assert waiting_weights(module, values[0]) == waiting
