"""Running a model to learn about it leaves no trace in it, nor in random numbers."""

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ModelError
from penstock.measuring.balance import balance
from penstock.measuring.stages import measure
from penstock.modules.untouched import same_attributes, same_random_numbers, untouched

# The machine of the tests may be busy.
pytestmark = pytest.mark.filterwarnings("ignore::penstock.measuring.MeasurementWarning")

X = torch.ones(4, 8)


class Restless(nn.Module):
    """A model whose forward changes all that a forward can change.

    It draws from every generator, counts its runs in a buffer and in attributes, and registers a
    hook in its first run.
    """

    runs: torch.Tensor

    def __init__(self, *, draws_outside_torch: bool = True) -> None:
        super().__init__()
        self.draws_outside_torch = draws_outside_torch
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))
        self.sizes: dict[int, int] = {}
        self.has_hook = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.add_(1)
        self.sizes[len(self.sizes)] = len(x)
        self.last_size = len(x)
        if not self.has_hook:
            self.has_hook = True
            self.layers[0].register_forward_hook(lambda *_: None)
        if self.draws_outside_torch:
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


# Numbers of Python's random were the same in every run of the graph, without an error.
def trace_in_vain(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="must draw its random numbers with torch"):
        split_by_tracing(model)


# Only torch's own generator was reset; Python's and NumPy's had advanced by as many draws as the
# model makes, so that data augmentation differed with and without a measurement.
@pytest.mark.parametrize("look", [split_by_layers, trace_in_vain, measure_stages, balance_layers])
def test_splitting_and_measuring_change_neither_generators_nor_buffers(
    look: Callable[[nn.Module], None],
) -> None:
    model = Restless()
    before = generator_states()
    look(model)
    assert generator_states() == before
    assert model.runs == 0


@pytest.mark.parametrize(("draws", "trace"), [(False, split_by_tracing), (True, trace_in_vain)])
def test_tracing_changes_neither_attributes_nor_hooks(
    draws: bool, trace: Callable[[nn.Module], None]
) -> None:
    model = Restless(draws_outside_torch=draws)
    names, before = set(vars(model)), generator_states()
    trace(model)
    assert generator_states() == before
    assert model.runs == 0
    assert (model.sizes, model.has_hook) == ({}, False)
    assert set(vars(model)) == names
    assert not model.layers[0]._forward_hooks


# A hook that was removed after the run would never be registered again, because the model
# remembers that it has registered it.
def test_a_hook_registered_in_a_real_run_stays_if_the_model_remembers_it() -> None:
    model = Restless()
    split_by_layers(model)
    model(X)
    assert len(model.layers[0]._forward_hooks) == 1


def test_gradients_are_none_inside_and_restored_after() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    gradient = layer.weight.grad
    with untouched([layer]):
        assert layer.weight.grad is None
        layer(torch.ones(2)).sum().backward()
    assert layer.weight.grad is gradient


def test_a_buffer_that_was_replaced_or_written_to_is_restored() -> None:
    norm = nn.BatchNorm1d(2)
    mean = norm.running_mean
    assert mean is not None
    with untouched([norm]):
        norm(torch.randn(4, 2))
        norm.running_mean = torch.ones(2)
    assert norm.running_mean is mean
    assert torch.equal(mean, torch.zeros(2))


def draw_and_fail() -> None:
    with same_random_numbers():
        raise KeyError(random.random(), np.random.random(), torch.rand(1))


def test_generators_are_reset_after_an_error_too() -> None:
    before = generator_states()
    with pytest.raises(KeyError):
        draw_and_fail()
    assert generator_states() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_generators_of_devices_are_reset() -> None:
    before = torch.cuda.get_rng_state_all()
    with same_random_numbers():
        torch.rand(5, device="cuda")
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))


class Frozen(dict[str, int]):
    """A dict that refuses to be changed, as configurations of diffusers are."""

    def clear(self) -> None:
        raise AssertionError

    def update(self, *_: object, **__: object) -> None:
        raise AssertionError


def test_a_dict_that_cannot_change_is_left_alone() -> None:
    # Tracing once tried to restore it, which emptied it and then raised.
    model = nn.Linear(1, 1)
    model.settings = Frozen(width=1)  # type: ignore[assignment]  # any attribute
    with same_attributes(model):
        model.other = 1  # type: ignore[assignment]  # any attribute
    assert model.settings == {"width": 1}
    assert not hasattr(model, "other")
