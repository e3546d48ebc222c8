"""The split backward is as exact as the plain one, on random numbers that differ in each run."""

import copy
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from tests.deferred.halves import MICROBATCHES, Apply, Gradients, run_plain, run_split

WIDTH, ROWS = 64, 128
# Both round differently, so that either may be closer by chance. The error of a whole gradient is
# a sum over thousands of roundings, so that chance explains a percent or two.
TOLERANCE = 1.05


class Experts(nn.Module):
    """Rows in groups, each with its own two matrices."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def _grouped(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        # Torch has no grouped products in float64.
        return _one_by_one(m, x)
    ends = torch.arange(1, 5, dtype=torch.int32) * (ROWS // 4)
    return F.grouped_mm(F.grouped_mm(x, m.up, offs=ends).tanh(), m.down.mT, offs=ends)


def _one_by_one(m: Any, x: torch.Tensor) -> torch.Tensor:
    groups = enumerate(x.chunk(4))
    return torch.cat([F.linear((rows @ m.up[i]).tanh(), m.down[i]) for i, rows in groups])


def _stacked(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(torch.bmm(x.view(4, -1, WIDTH), m.up).tanh(), m.down.mT).view_as(x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "conv": lambda: Apply(
        lambda m, x: m.g(m.f(x.view(2, WIDTH, -1)).tanh()),
        f=nn.Conv1d(WIDTH, WIDTH, 3),
        g=nn.ConvTranspose1d(WIDTH, WIDTH, 3),
    ),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0),
    "embedding": lambda: Apply(
        lambda m, x: m.words((x[:, 0].double().abs() * 20).long() % 32),
        words=nn.Embedding(32, WIDTH),
    ),
    "stacked_experts": lambda: Experts(_stacked),
    "experts_one_by_one": lambda: Experts(_one_by_one),
    "grouped_experts": lambda: Experts(_grouped),
}


def _flat(gradients: Gradients) -> torch.Tensor:
    found = [gradient for gradient in gradients.parameters.values() if gradient is not None]
    return torch.cat([gradient.double().flatten() for gradient in found])


def _errors(name: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return the relative errors of the gradient in two halves and of the whole one."""
    torch.manual_seed(seed)
    module = MODULES[name]().to(dtype)
    values = [torch.randn(ROWS, WIDTH).to(dtype) for _ in range(MICROBATCHES)]
    exact = _flat(run_plain(copy.deepcopy(module).double(), [v.double() for v in values]))
    plain = _flat(run_plain(copy.deepcopy(module), values))
    split = _flat(run_split(module, values))
    return torch.stack([(found - exact).norm() / exact.norm() for found in (split, plain)])


def _check(name: str, dtype: torch.dtype, first: int, draws: int) -> None:
    # Chance explains a tenth in one gradient of an embedding, which has few roundings.
    errors = [_errors(name, dtype, seed) for seed in range(first, first + draws)]
    error, plain_error = torch.stack(errors).mean(dim=0)
    assert error <= TOLERANCE * plain_error, f"from seed {first}: {error:.3e}, {plain_error:.3e}"


every_module = pytest.mark.parametrize("name", MODULES)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


@every_module
@every_dtype
def test_two_halves_are_as_exact_as_the_whole(name: str, dtype: torch.dtype) -> None:
    _check(name, dtype, 0, 4)


@pytest.mark.slow
@every_module
@every_dtype
def test_two_halves_of_fresh_gradients_are_as_exact_as_the_whole(
    name: str, dtype: torch.dtype
) -> None:
    _check(name, dtype, secrets.randbits(32), 32)
