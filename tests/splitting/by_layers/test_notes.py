"""What one stage tells another comes out as it went in."""

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutput

from penstock.errors import ModelError
from penstock.splitting.by_layers.notes import (
    Value,
    describe,
    describe_inputs,
    read_notes,
    rebuild,
    write_notes,
)
from penstock.splitting.by_layers.stand_ins import StandIn
from tests.splitting.small import Pair

CPU = torch.device("cpu")
TREES: list[Any] = [
    torch.ones(2, 3),
    (torch.ones(2), None, 3, 0.5, True, "word"),
    {"h": [torch.ones(1), (torch.zeros((), dtype=torch.bool),)], "n": float("inf")},
    OrderedDict(a=torch.ones(0, 2, dtype=torch.complex64)),
    BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=None),  # type: ignore[arg-type]  # it may be any tensor
    (),
    None,
]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("is_sent", [True, False])
def test_any_tree_goes_to_another_stage_with_or_without_values(tree: Any, is_sent: bool) -> None:
    entry, tensors = describe("layers.0", 1, tree)
    notes = write_notes("", (entry,), tuple(value for value, _ in tensors))
    entries, sent, changed = read_notes(notes)
    assert (entries, changed) == ({("layers.0", 1): entry}, {})
    values = dict(zip(sent, [t for _, t in tensors], strict=True)) if is_sent else {}
    found = rebuild(entries["layers.0", 1], values, CPU)
    assert type(found) is (
        StandIn if isinstance(tree, torch.Tensor) and not is_sent else type(tree)
    )
    for leaf, expected in zip(tree_leaves(found), tree_leaves(tree), strict=True):
        if isinstance(expected, torch.Tensor):
            assert isinstance(leaf, StandIn) is not is_sent
            assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
            assert leaf is expected or not is_sent
        else:
            assert leaf == expected


def test_notes_of_later_stages_have_those_of_earlier_ones() -> None:
    first, _ = describe("a", 0, torch.ones(1))
    second, _ = describe("b", 0, torch.ones(2))
    notes = write_notes(write_notes("", (first,), ()), (second,), (Value("b", 0, ""),))
    assert json.loads(notes) == {
        "entries": [
            ["a", 0, "*", ["T1 torch.float32"], [""]],
            ["b", 0, "*", ["T2 torch.float32"], [""]],
        ],
        "sides": [],
        "changed": {},
        "sent": [["b", 0, ""]],
    }


def test_values_are_known_by_their_place() -> None:
    _, tensors = describe("layer", 2, (torch.ones(1), {"x": [None, torch.ones(2)]}))
    assert [value for value, _ in tensors] == [
        Value("layer", 2, "[0]"),
        Value("layer", 2, "[1]['x'][1]"),
    ]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(1), {"b": torch.ones(2)}, torch.ones(3)), {"extra": torch.ones(4)}),
        ((torch.ones(1),), {"extra": 0, "rest": torch.ones(3), "tree": {"b": torch.ones(2)}}),
    ],
)
def test_inputs_are_known_by_the_names_of_their_parameters(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    entry, tensors = describe_inputs(["x", "tree", "rest"], args, kwargs)
    found = {value.leaf: len(tensor) for value, tensor in tensors}
    expected = {"x": 1, "tree['b']": 2, "rest": 3, "extra": 4}
    assert found == {name: expected[name] for name in found}
    assert {"x", "tree['b']", "rest"} <= found.keys()
    rebuilt = rebuild(entry, dict(tensors), CPU)
    assert isinstance(rebuilt, tuple)
    assert rebuilt[1].keys() == kwargs.keys()


def test_arguments_beyond_the_known_ones_have_numbers() -> None:
    _, tensors = describe_inputs(["x"], (torch.ones(1), torch.ones(2)), {})
    assert [value.leaf for value, _ in tensors] == ["x", "1"]


class Thing:
    pass


@pytest.mark.parametrize(
    ("path", "tree", "message"),
    [
        ("layers.0", (Thing(),), r"'layers\.0' returns a Thing, which cannot go to another stage"),
        ("", [Thing()], "the model takes a Thing, which cannot go to another stage"),
        (
            "layers.0",
            Pair(torch.ones(1), torch.ones(1)),
            r"'layers\.0' returns a tree that cannot",
        ),
    ],
)
def test_what_cannot_be_written_down_is_refused(path: str, tree: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(path, 0, tree)
