"""Records of calls survive the way to another stage."""

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from penstock.errors import ModelError
from penstock.splitting.by_layers.records.call_records import (
    Value,
    describe,
    describe_inputs,
    rebuild,
)
from penstock.splitting.by_layers.records.record_text import read_records, write_records
from penstock.splitting.by_layers.stand_ins import StandIn
from penstock.torch_private import tree_leaves
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
def test_any_tree_is_rebuilt_on_another_stage_with_or_without_values(
    tree: Any, is_sent: bool
) -> None:
    record, tensors = describe("layers.0", 1, tree)
    text = write_records("", (record,), tuple(value for value, _ in tensors))
    records, sent, changed = read_records(text)
    assert (records, changed) == ({("layers.0", 1): record}, {})
    values = dict(zip(sent, [t for _, t in tensors], strict=True)) if is_sent else {}
    found = rebuild(records["layers.0", 1], values, CPU)
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


def test_text_for_later_stages_has_the_records_of_earlier_ones() -> None:
    first, _ = describe("a", 0, torch.ones(1))
    second, _ = describe("b", 0, torch.ones(2))
    text = write_records(write_records("", (first,), ()), (second,), (Value("b", 0, ""),))
    assert json.loads(text) == {
        "calls": [
            ["a", 0, "*", ["T1 torch.float32"], [""]],
            ["b", 0, "*", ["T2 torch.float32"], [""]],
        ],
        "hooks": [],
        "changed": {},
        "sent": [["b", 0, ""]],
    }


def test_values_are_named_by_their_position() -> None:
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
def test_inputs_are_named_by_their_parameters(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    record, tensors = describe_inputs(["x", "tree", "rest"], args, kwargs)
    found = {value.leaf: len(tensor) for value, tensor in tensors}
    expected = {"x": 1, "tree['b']": 2, "rest": 3, "extra": 4}
    assert found == {name: expected[name] for name in found}
    assert {"x", "tree['b']", "rest"} <= found.keys()
    rebuilt = rebuild(record, dict(tensors), CPU)
    assert isinstance(rebuilt, tuple)
    assert rebuilt[1].keys() == kwargs.keys()


def test_further_arguments_are_named_by_numbers() -> None:
    _, tensors = describe_inputs(["x"], (torch.ones(1), torch.ones(2)), {})
    assert [value.leaf for value, _ in tensors] == ["x", "1"]


class Thing:
    pass


@pytest.mark.parametrize(
    ("path", "tree", "message"),
    [
        (
            "layers.0",
            (Thing(),),
            r"'layers\.0' returns a Thing, which cannot be sent to another stage",
        ),
        ("", [Thing()], "the model takes a Thing, which cannot be sent to another stage"),
        (
            "layers.0",
            Pair(torch.ones(1), torch.ones(1)),
            r"'layers\.0' returns a tree that cannot",
        ),
    ],
)
def test_values_that_cannot_be_sent_are_refused(path: str, tree: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(path, 0, tree)
