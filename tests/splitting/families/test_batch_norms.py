"""What torch's batch norms compute on a CPU, and what they do in one memory layout."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.nn import functional

from tests.splitting.families.batch_norms import batch_norms_in_one_layout


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values and sizes, in another order in memory."""
    return tensor.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)


def check(training: bool, around: AbstractContextManager[None]) -> None:
    """Compare gradients with finite differences, of inputs that lie in memory in another order."""
    given = torch.randn(1, 3, 8, 1, dtype=torch.float64, generator=torch.manual_seed(0))
    mean, variance = torch.zeros(3).double(), torch.ones(3).double()
    weight, bias = (value.clone().requires_grad_() for value in (variance, mean))

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        state = mean.clone(), variance.clone()
        return functional.batch_norm(permuted(x), *state, weight, bias, training)

    with around:
        gradcheck(run, (given.requires_grad_(), weight, bias))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_in_one_layout_agree_with_finite_differences(training: bool) -> None:
    check(training, batch_norms_in_one_layout())


@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_batch_norms_do_not(training: bool) -> None:
    # If this fails, torch is right by now, and the table needs no layout of its own.
    with pytest.raises(GradcheckError):
        check(training, nullcontext())
