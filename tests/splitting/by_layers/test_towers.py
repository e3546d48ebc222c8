"""The lists of layers of a model are found: where most of its parameters are."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ModelError
from penstock.splitting.by_layers.towers import find_towers
from tests.splitting.checking import assert_same_gradients
from tests.splitting.small import WIDTH, Block, Chain, numbers


def tower(layers: int) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(layers))})


class Two(nn.Module):
    """Two towers, and short lists that are not where the layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(1, 1) for _ in range(5))
        self.encoder, self.decoder = tower(3), tower(2)


class Experts(nn.Module):
    """Layers that have lists of modules themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.ModuleList(nn.Linear(9, 9) for _ in range(8)), nn.Linear(9, 9))
            for _ in range(4)
        )


class Grouped(nn.Module):
    """Few groups of several layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(tower(3) for _ in range(2))


@pytest.mark.parametrize(
    ("make", "stages", "expected"),
    [
        (Chain, 4, ["layers"]),
        (Two, 5, ["encoder.layers", "decoder.layers"]),
        (Experts, 4, ["layers"]),
        (Grouped, 2, ["groups"]),
        (Grouped, 4, ["groups.0.layers", "groups.1.layers"]),
    ],
)
def test_lists_of_layers_are_found(
    make: type[nn.Module], stages: int, expected: list[str]
) -> None:
    assert find_towers(make(), stages) == expected


def test_a_model_without_enough_layers_says_what_it_has() -> None:
    with pytest.raises(ModelError) as caught:
        find_towers(Chain(3), 4)
    assert str(caught.value) == (
        "the model has no list of 4 layers or more ('layers' has 3); name the layers to cut "
        "between (layers='path.of.the.list'), use fewer stages, or give an example to split it by "
        "tracing"
    )


def test_a_number_of_stages_alone_splits_between_the_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Chain()
    with caplog.at_level(logging.INFO, "penstock"):
        pipe = ps.split(model, stages=4)
    assert caplog.messages == ["the layers to split between are those of 'layers'"]
    assert str(pipe).startswith("4 stages of the layers in layers\n")
    assert_same_gradients(model, pipe, (numbers(8, 3),))


def test_auto_finds_the_lists_although_there_is_an_example() -> None:
    torch.manual_seed(0)
    model, x = Chain(), numbers(8, 3)
    pipe = ps.split(model, layers="auto", stages=2, example=[x])
    assert pipe.layers == ("layers",)
    first = next(name for name, _ in pipe.stages[1].named_parameters())
    assert first == "layers.2.linear.weight"


class Late(nn.Module):
    """Runs its second tower before its first, and never its third."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.unused = tower(2), tower(2), tower(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.early, self.late):
            layers: Any = module["layers"]
            for layer in layers:
                x = layer(x)
        return x


def test_an_example_shows_which_towers_run_and_in_which_order() -> None:
    torch.manual_seed(0)
    model, x = Late(), numbers(8, WIDTH)
    pipe = ps.split(model, layers="auto", stages=4, example=[x])
    assert pipe.layers == ("early.layers", "late.layers")
    assert_same_gradients(model, pipe, (x,))


class ByTurns(nn.Module):
    """Runs a layer of each of two lists by turns; the norms are the smaller list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x))
        return x


def test_of_lists_that_run_by_turns_the_largest_is_cut() -> None:
    # Both were cut between, one after the other, which is not how they run.
    torch.manual_seed(0)
    model, x = ByTurns().double(), numbers(8, WIDTH)
    pipe = ps.split(model, layers="auto", stages=4, example=[x])
    assert pipe.layers == ("layers",)
    assert_same_gradients(model, pipe, (x,))


def test_several_lists_without_an_example_are_refused_at_the_split() -> None:
    # The first step said that a module of a later stage was called before.
    with pytest.raises(ModelError) as caught:
        ps.split(Late(), stages=4)
    assert str(caught.value) == (
        "the model has several lists of layers ('late.layers', 'early.layers', 'unused.layers'), "
        "and only an example shows which of them run, and in which order; give one "
        "(layers='auto', example_kwargs={...}), or name the lists in the order in which they run "
        "(layers=['late.layers', 'early.layers', 'unused.layers'])"
    )


class LateWithExample(Late):
    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2, WIDTH)}


def test_an_example_of_the_models_own_shows_which_towers_run() -> None:
    torch.manual_seed(0)
    model, x = LateWithExample(), numbers(8, WIDTH)
    pipe = ps.split(model, stages=4)
    assert pipe.layers == ("early.layers", "late.layers")
    assert_same_gradients(model, pipe, (x,))


class Either(nn.Module):
    """Runs one tower on words and the other on pictures."""

    dummy_inputs = {"input_ids": torch.ones(2, WIDTH)}  # noqa: RUF012  # as a property would return it
    config = SimpleNamespace(image_size=WIDTH, num_channels=1)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pictures = tower(4), tower(4)

    def forward(
        self, input_ids: torch.Tensor | None = None, pixel_values: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = pixel_values if input_ids is None else input_ids
        layers: Any = (self.pictures if input_ids is None else self.words)["layers"]
        for layer in layers:
            x = layer(x)
        assert x is not None
        return x


def test_lists_that_run_on_some_inputs_only_are_refused_at_the_split() -> None:
    # The first step with pictures said that a module of a later stage was called before.
    with pytest.raises(ModelError) as caught:
        ps.split(Either(), stages=4)
    assert str(caught.value) == (
        "the model does not run the layers of 'words.layers' on pixel_values, so that only an "
        "example shows what to cut; give one (layers='auto', example_kwargs={...}), or name the "
        "lists that run (layers=[...])"
    )
    assert ps.split(Either(), layers="pictures.layers", stages=4).layers == ("pictures.layers",)


class Stages(nn.Module):
    """Runs lists inside of a list, each after one layer of another list."""

    def __init__(self) -> None:
        super().__init__()
        self.widths = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.unused = tower(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for width, blocks in zip(self.widths, self.blocks, strict=True):
            x = width(x)
            layers: Any = blocks
            for layer in layers:
                x = layer(x)
        return x


def test_lists_inside_of_a_list_are_cut_if_only_they_run() -> None:
    # The outer list's own children are never called, so that the tower was taken to be unused.
    torch.manual_seed(0)
    model, x = Stages().double(), numbers(8, WIDTH)
    pipe = ps.split(model, layers="auto", stages=4, example=[x])
    assert pipe.layers == ("blocks.0", "blocks.1")
    assert_same_gradients(model, pipe, (x,))


class Several(nn.Module):
    """Runs the smaller of two towers, the larger of which is far larger."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ModuleList(nn.Linear(20 * WIDTH, 20 * WIDTH) for _ in range(4))
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_large_tower_that_does_not_run_does_not_hide_a_small_one() -> None:
    # The model was run only if several of its lists were large.
    torch.manual_seed(0)
    model, x = Several().double(), numbers(8, WIDTH)
    pipe = ps.split(model, layers="auto", stages=4, example=[x])
    assert pipe.layers == ("layers",)
    assert_same_gradients(model, pipe, (x,))
