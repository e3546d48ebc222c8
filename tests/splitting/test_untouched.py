"""Running a model to learn about it draws no random number that the user would miss."""

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.measuring.balance import balance
from penstock.measuring.stages import measure
from penstock.splitting.untouched import same_random_numbers

X = torch.ones(4, 8)


class Restless(nn.Module):
    """A model that draws from every generator there is, and counts its runs in a buffer."""

    runs: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add_(1)
        x = x * random.random() + float(np.random.random())
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5)
        return x


def generator_states() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


def split_by_layers(model: nn.Module) -> None:
    ps.split(model, layers="layers", stages=2, example=[X])


def split_by_tracing(model: nn.Module) -> None:
    ps.split(model, stages=2, example=[X])


def measure_stages(model: nn.Module) -> None:
    pipe = ps.split(model, layers="layers", stages=2)
    measure(pipe, example=(X,), loss=nn.functional.mse_loss, target=X, repeats=1)


def balance_layers(model: nn.Module) -> None:
    balance(
        model,
        layers="layers",
        placement=ps.Placement.loop(2),
        example=[X],
        loss=nn.functional.mse_loss,
        target=X,
    )


# Only torch's own generator was put back; Python's and NumPy's went on by as many draws as the
# model makes, so that data augmentation differed with and without a measurement.
@pytest.mark.parametrize(
    "look", [split_by_layers, split_by_tracing, measure_stages, balance_layers]
)
def test_a_look_at_a_model_leaves_all_generators_and_buffers_alone(
    look: Callable[[nn.Module], None],
) -> None:
    model = Restless()
    before = generator_states()
    look(model)
    assert generator_states() == before
    assert model.runs == 0


def draw_and_fail() -> None:
    with same_random_numbers():
        raise KeyError(random.random(), np.random.random(), torch.rand(1))


def test_random_numbers_are_put_back_after_an_error_too() -> None:
    before = generator_states()
    with pytest.raises(KeyError):
        draw_and_fail()
    assert generator_states() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_generators_of_devices_are_put_back() -> None:
    before = torch.cuda.get_rng_state_all()
    with same_random_numbers():
        torch.rand(5, device="cuda")
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))
