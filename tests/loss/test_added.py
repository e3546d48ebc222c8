"""Losses that a stage adds in its forward."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError
from penstock.loss.added import add_loss, collect_losses


class Balanced(nn.Module):
    """A layer that adds a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = torch.tanh(self.layer(x))
        add_loss(0.01 * y.square().mean())
        return y


def test_losses_are_collected_in_order() -> None:
    with collect_losses() as losses:
        add_loss(torch.tensor(1.0))
        add_loss(torch.tensor([2.0]))
    assert losses == [torch.tensor(1.0), torch.tensor(2.0)]
    assert [loss.dim() for loss in losses] == [0, 0]


def test_outside_a_step_nothing_happens() -> None:
    add_loss(torch.tensor(1.0))
    with collect_losses() as losses:
        pass
    add_loss(torch.tensor(1.0))
    assert losses == []


def test_nested_contexts_collect_their_own_losses_even_after_an_error() -> None:
    with collect_losses() as outer:
        add_loss(torch.tensor(1.0))
        with pytest.raises(PipelineError), collect_losses():
            add_loss(torch.ones(2))
        with collect_losses() as inner:
            add_loss(torch.tensor(2.0))
        add_loss(torch.tensor(3.0))
    assert ([float(x) for x in outer], [float(x) for x in inner]) == ([1, 3], [2])


def test_threads_collect_their_own_losses() -> None:
    barrier = Barrier(3)

    def collect(number: int) -> list[float]:
        with collect_losses() as losses:
            barrier.wait()
            add_loss(torch.tensor(float(number)))
            barrier.wait()
        return [float(loss) for loss in losses]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(collect, range(3))) == [[0], [1], [2]]


def test_the_gradient_is_exact_and_not_doubled_by_a_checkpoint() -> None:
    plain = Balanced()
    module = Balanced()
    module.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    y = plain(x)
    expected = torch.autograd.grad(y.sum() + 0.01 * y.square().mean(), list(plain.parameters()))
    with collect_losses() as losses:
        out = checkpoint(module, x, use_reentrant=False)
    (loss,) = losses
    found = torch.autograd.grad(out.sum() + loss, list(module.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (module.calls, len(losses)) == (2, 1)


def test_a_loss_that_would_have_no_gradient_is_refused() -> None:
    # A reentrant checkpoint runs its forward without a graph, and its recomputation elsewhere.
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with collect_losses(), pytest.raises(PipelineError, match="use_reentrant=True"):
        checkpoint(Balanced(), x, use_reentrant=True)


@pytest.mark.parametrize("loss", [torch.ones(2), torch.tensor(1), torch.tensor(1j), 1.0, None])
def test_an_added_loss_that_is_not_one_real_number_is_refused(loss: torch.Tensor) -> None:
    with collect_losses(), pytest.raises(PipelineError, match="an added loss must be one real"):
        add_loss(loss)
