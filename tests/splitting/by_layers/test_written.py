"""Values that are written to in place, and tensors that layers keep, are right or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.layers import split_layers
from tests.splitting.checking import assert_same_gradients
from tests.splitting.small import WIDTH, Block, numbers

X = numbers(8, WIDTH)


class Between(nn.Module):
    """A model that writes to what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x.view(-1).add_(1)
        return x


class AtOnce(Between):
    """A model that writes to its input, and uses it in all layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sub_(3)
        y = x * 1
        for layer in self.layers:
            y = layer(y, x)
        return y


class First(nn.Module):
    """A first layer that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(nn.functional.relu(x, inplace=True))
        return result


class Inside(nn.Module):
    """A model with such a first layer, which may use that layer's input in other layers."""

    def __init__(self, *, is_used: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([First(), *(Block() for _ in range(3))])
        self.is_used = is_used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        for layer in self.layers:
            is_late = self.is_used and layer is not self.layers[0]
            x = layer(x, doubled) if is_late else layer(x)
        return x


class Both(Inside):
    """A model that writes to the same value in a layer and between layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers[0](x)
        x.add_(1)
        for layer in self.layers[1:]:
            y = layer(y, x)
        return y


@pytest.mark.parametrize("make", [Between, AtOnce])
def test_a_write_between_layers_happens_once_with_an_example(
    make: Callable[[], nn.Module],
) -> None:
    # A stage sent what the code had written to, and the next stage ran that code again: the sum
    # was made twice, at every boundary, with and without an example.
    torch.manual_seed(0)
    model = make()
    expected = model(X.clone())
    pipe = split_layers(model, ["layers"], 4, (X.clone(),), {})
    for _ in range(2):
        assert torch.equal(pipe(X.clone()), expected)
    if make is Between:
        assert_same_gradients(model, pipe, (X,))


class Joining(nn.Module):
    """Writes what one layer returned into a tensor made by hand, or made like another's."""

    def __init__(self, is_like_another: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.is_like_another = is_like_another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        second = self.layers[1](x)
        made = second if self.is_like_another else x
        joined = made.new_zeros(len(x), 2, WIDTH)
        joined[:, 0] = first
        joined[:, 1] = second
        y: torch.Tensor = joined.sum(1)
        for layer in self.layers[2:]:
            y = layer(y)
        return y


@pytest.mark.parametrize("is_like_another", [False, True])
def test_what_is_written_to_a_tensor_that_another_stage_makes_is_sent(
    is_like_another: bool,
) -> None:
    # Stages after the write have no use for the value, but make the tensor too. They refused to
    # write to it what they had not been sent, in the first step and with an example.
    torch.manual_seed(0)
    model = Joining(is_like_another)
    pipe = split_layers(model, ["layers"], 4, (X.clone(),), {})
    assert_same_gradients(model, pipe, (X,))


class JoiningWithOwnExample(Joining):
    """A model that says by itself what it takes."""

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": numbers(2, WIDTH)}


def test_what_is_written_to_such_a_tensor_is_needed_without_an_example_too() -> None:
    # Without an example each stage has the inputs, so that it can make the tensor; with one, not.
    torch.manual_seed(0)
    model = JoiningWithOwnExample(is_like_another=False)
    assert_same_gradients(model, split_layers(model, ["layers"], 4), (X,))


def test_writing_to_what_a_layer_returned_is_refused_without_an_example() -> None:
    pipe = split_layers(Between(), ["layers"], 4)
    with pytest.raises(ModelError, match=r"what 'layers\.0' returns .* was written to in place"):
        pipe(X.clone())


@pytest.mark.parametrize("make", [AtOnce, Inside])
def test_an_input_that_was_written_to_is_not_sent_without_an_example(
    make: Callable[[], nn.Module],
) -> None:
    pipe = split_layers(make(), ["layers"], 4)
    with pytest.raises(ModelError, match=r"depends on what \"the model's inputs\" returned"):
        pipe(X.clone())


def test_an_input_that_no_other_layer_uses_may_be_written_to() -> None:
    model = Inside(is_used=False)
    expected = model(X.clone())
    assert torch.equal(split_layers(model, ["layers"], 4)(X.clone()), expected)
    assert torch.equal(split_layers(model, ["layers"], 4, (X.clone(),), {})(X.clone()), expected)


def test_an_input_that_a_layer_writes_to_and_others_use_is_refused() -> None:
    pipe = split_layers(Inside(), ["layers"], 4, (X.clone(),), {})
    with pytest.raises(ModelError, match=r"an input of the model .* was written to in place"):
        pipe(X.clone())
    with pytest.raises(ModelError, match=r"made in 'layers\.0', but not returned by it"):
        split_layers(Both(), ["layers"], 4, (X.clone(),), {})


class Keeping(nn.Module):
    """A model that uses a tensor kept by its first layer at the end."""

    def __init__(self, *, is_constant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keeper(is_constant=is_constant), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        inner: Any = self.layers[0].get_submodule("inner")
        result: torch.Tensor = x * inner.kept
        return result


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(WIDTH, dtype=torch.float64) * 2


class Keeper(nn.Module):
    def __init__(self, *, is_constant: bool) -> None:
        super().__init__()
        self.block, self.inner, self.is_constant = Block(), Inner(), is_constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        if not self.is_constant:
            self.inner.kept = y * 2
        return y


def test_a_tensor_that_a_layer_keeps_from_an_earlier_run_is_not_used() -> None:
    # An attribute went to other stages as it was when the model was split: a stale tensor.
    model = Keeping(is_constant=False)
    model(X)
    with pytest.raises(
        ModelError, match=r"uses layers\.0\.inner\.kept, which was made on another"
    ):
        split_layers(model, ["layers"], 2)(X)
    with pytest.raises(ModelError, match=r"made in 'layers\.0', but not returned by it"):
        split_layers(model, ["layers"], 2, (X,), {})


class Tallying(nn.Module):
    """A model that adds a number kept by its first layer, and resets it at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Noting(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self.layers[0]
        first.noted = 0.0
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = x + first.noted
        return result


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.noted = Block(), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        self.noted = y.mean().item()
        return y


@pytest.mark.parametrize("given", [(), ((X,), {})], ids=["plain", "example"])
def test_a_number_that_a_layer_changes_is_not_used_with_its_old_value(
    given: tuple[Any, ...],
) -> None:
    # The next stage added the 0.0 that the attribute had at the start.
    pipe = split_layers(Tallying(), ["layers"], 2, *given)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"uses layers\.0\.noted, which was made on another"):
            pipe(X)


def test_a_constant_of_a_layer_is_known_on_all_stages_with_an_example() -> None:
    model = Keeping(is_constant=True)
    expected = model(X)
    assert torch.equal(split_layers(model, ["layers"], 2, (X,), {})(X), expected)
    with pytest.raises(ModelError, match="split with example="):
        split_layers(model, ["layers"], 2)(X)
