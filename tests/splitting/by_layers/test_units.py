"""Which modules a split by layers assigns to stages, and by which names lists are found."""

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.units import find_units
from tests.splitting import small


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(3, 2)
        self.encoder = Tower(self.shared)
        self.decoder = Tower(self.shared)
        self.rotary = nn.Identity()
        self.head = nn.Linear(2, 3)


class Tower(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.first = nn.LayerNorm(2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.norm = nn.LayerNorm(2)
        self.register_buffer("table", torch.zeros(2), persistent=False)


def test_layers_and_other_units_come_in_order() -> None:
    found = find_units(Towers(), ["encoder.layers", "decoder.layers"])
    assert [(unit.paths, unit.layer, unit.after) for unit in found.units] == [
        (("shared", "encoder.embed", "decoder.embed"), None, 0),
        (("encoder.first",), None, 0),
        (("encoder.layers.0",), 0, 1),
        (("encoder.layers.1",), 1, 2),
        (("encoder.norm",), None, 2),
        (("decoder.first",), None, 3),
        (("decoder.layers.0",), 2, 3),
        (("decoder.layers.1",), 3, 4),
        (("decoder.norm",), None, 4),
        (("head",), None, 4),
    ]
    assert found.containers == ("", "encoder", "encoder.layers", "decoder", "decoder.layers")
    assert found.layers == (
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
    )


def test_units_are_found_by_any_of_their_paths() -> None:
    found = find_units(Towers(), ["encoder.layers", "decoder.layers"])
    unit = found.find("decoder.embed")
    assert unit is not None
    assert unit.path == "shared"
    assert found.find("encoder") is None
    assert found.find("rotary") is None


def test_lists_that_are_never_called_are_containers() -> None:
    found = find_units(small.Norms(), ["layers"])
    assert found.containers == ("", "norms", "layers", "gains")
    assert [unit.path for unit in found.units if unit.layer is None] == [
        "norms.0",
        "norms.1",
        "norms.2",
        "norms.3",
    ]


def test_a_container_with_two_names_counts_once() -> None:
    found = find_units(small.Aliased(), ["trunk.layers"])
    assert found.containers == ("", "trunk", "trunk.layers")
    assert found.aliases == {"body": "trunk"}
    assert found.find_container("body") == "trunk"
    assert found.find_container("nothing") is None
    assert [unit.path for unit in found.units] == [f"trunk.layers.{i}" for i in range(4)]


def test_a_repeated_layer_is_one_unit() -> None:
    found = find_units(small.Repeated(), ["layers"])
    assert [(unit.paths, unit.layer) for unit in found.units] == [
        (("layers.0", "layers.2", "layers.3"), 0),
        (("layers.1",), 1),
    ]


def test_a_list_is_found_by_its_whole_path() -> None:
    found = find_units(Towers(), ["decoder.layers"])
    assert found.layers == ("decoder.layers.0", "decoder.layers.1")


def test_a_list_is_found_by_the_end_of_its_path_if_that_is_unique() -> None:
    wrapped = nn.ModuleDict({"base_model": Towers()})
    found = find_units(wrapped, ["decoder.layers"])
    assert found.layers == ("base_model.decoder.layers.0", "base_model.decoder.layers.1")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            ["layers"],
            "layers must name one module (got 'layers', the end of 'encoder.layers', "
            "'decoder.layers'); give a whole path",
        ),
        (
            ["encoder.layer"],
            "the model has no module 'encoder.layer'; its lists of modules are 'encoder.layers', "
            "'decoder.layers'",
        ),
        (["head"], "layers must name modules with children (got 'head')"),
        (
            ["encoder", "encoder.layers"],
            "a layer must not hold another list of layers (got 'encoder.layers')",
        ),
    ],
)
def test_names_that_are_not_lists_of_layers_are_refused(lists: list[str], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        find_units(Towers(), lists)
    assert str(caught.value) == message


def test_a_model_without_lists_has_no_hint() -> None:
    with pytest.raises(ModelError) as caught:
        find_units(nn.Linear(2, 2), ["layers"])
    assert str(caught.value) == "the model has no module 'layers'"
