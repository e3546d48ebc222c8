"""Trees taken apart and put together again."""

import enum
import json
import math
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BoundaryError
from penstock.tensors.tree import count_tensors, flatten, map_tensors, unflatten

DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]

tensors = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
constants = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text(max_size=3) | st.integers()
trees = st.recursive(
    tensors | constants,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type, value and, for tensors, identity."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(trees)
def test_a_tree_survives_json(tree: Any) -> None:
    structure, leaves = flatten(tree)
    assert count_tensors(structure) == len(leaves)
    assert same(unflatten(json.loads(json.dumps(structure)), leaves), tree)


def test_the_structure_is_plain_data() -> None:
    h, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    structure, leaves = flatten({"h": h, "mask": [mask, None], "n": 3, 4: (h, "s")})
    assert structure == [
        "d",
        [
            ["h", "T"],
            ["mask", ["l", ["T", ["c", None]]]],
            ["n", ["c", 3]],
            [4, ["t", ["T", ["c", "s"]]]],
        ],
    ]
    assert same(leaves, [h, mask, h])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 1e-320, 2**80])
def test_every_number_survives_json(number: float) -> None:
    structure, _ = flatten([number])
    assert repr(unflatten(json.loads(json.dumps(structure)), [])) == repr([number])


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.IntEnum):
    RED = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Output(OrderedDict[str, Any]):
    """Like the outputs of Hugging Face models."""


@pytest.mark.parametrize(
    ("given_tree", "plain"),
    [
        (Pair(1, [2]), (1, [2])),
        (Output(logits=1), {"logits": 1}),
        (UserDict({"a": 1}), {"a": 1}),
        (torch.Size([2, 3]), (2, 3)),
        (Colour.RED, 1),
        (Mode.FAST, "fast"),
        ({Colour.RED: 1, Mode.FAST: 2, True: 3}, {1: 3, "fast": 2}),
    ],
)
def test_special_kinds_of_plain_values_become_plain(given_tree: object, plain: object) -> None:
    structure, leaves = flatten(given_tree)
    assert same(unflatten(structure, leaves), plain)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (torch.float32, "dtype"),
        (torch.device("cpu"), "device"),
        (object(), "object"),
    ],
)
def test_the_type_of_a_value_that_cannot_cross_is_named(value: object, name: str) -> None:
    with pytest.raises(BoundaryError, match=rf"^a value of type {name} cannot cross"):
        flatten({"inside": [value]})


def test_a_key_that_cannot_cross_is_shown() -> None:
    with pytest.raises(BoundaryError, match=r"must have str or int keys \(got \(1, 2\)\)"):
        flatten({(1, 2): 3})


def test_too_few_and_too_many_tensors_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(BoundaryError, match=r"\(got fewer\)"):
        unflatten(["t", ["T", "T"]], [one])
    with pytest.raises(BoundaryError, match=r"as many tensors as it has \(got 2\)"):
        unflatten("T", [one, one])


@pytest.mark.parametrize(
    "structure", ["X", ["x", []], ["t"], ["t", "T"], ["d", 1], ["d", [["k"]]], [], 3]
)
def test_an_invalid_structure_is_refused(structure: Any) -> None:
    with pytest.raises(BoundaryError, match="cannot have the"):
        count_tensors(structure)


def test_map_tensors_keeps_the_rest() -> None:
    tree = {"h": torch.ones(2), "n": 3}
    doubled = map_tensors(lambda tensor: 2 * tensor, tree)
    assert doubled.keys() == {"h", "n"}
    torch.testing.assert_close(doubled["h"], torch.full((2,), 2.0))
    assert doubled["n"] == 3
