"""Formats as messages between ranks."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BoundaryError
from penstock.tensors.tree import flatten
from penstock.tensors.wire_format import Format, TensorFormat, describe

ALL_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_survives(dtype: torch.dtype) -> None:
    form = Format('"T"', (TensorFormat((2, 0, 3), dtype, False),))
    assert Format.from_bytes(form.to_bytes()) == form


@given(
    st.lists(
        st.builds(
            TensorFormat,
            st.lists(st.integers(0, 100), max_size=4).map(tuple),
            st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]),
            st.booleans(),
        ),
        max_size=4,
    ).map(tuple)
)
def test_every_format_survives(leaves: tuple[TensorFormat, ...]) -> None:
    form = Format(json.dumps(["t", ["T"] * len(leaves)]), leaves)
    assert Format.from_bytes(form.to_bytes()) == form


def test_a_tree_is_described_by_structure_shapes_and_dtypes() -> None:
    tree = {
        "h": torch.ones(2, 3, requires_grad=True),
        "mask": torch.ones(2, dtype=torch.bool),
        "n": 3,
    }
    structure, tensors = flatten(tree)
    form = describe(structure, tensors)
    h = TensorFormat((2, 3), torch.float32, True)
    mask = TensorFormat((2,), torch.bool, False)
    assert form == Format('["d", [["h", "T"], ["mask", "T"], ["n", ["c", 3]]]]', (h, mask))
    assert form.tree_structure == structure
    assert form.of_gradients == Format('""', (h,))


def test_hooks_are_reported_but_do_not_make_another_form() -> None:
    tensors = [torch.ones(2, requires_grad=True) for _ in range(3)]
    structure = ["t", ["T"] * 3]
    form = describe(structure, tensors, hooked=(1,))
    assert Format.from_bytes(form.to_bytes()).hooked == (1,)
    assert form == describe(structure, tensors)


def test_an_empty_tensor_of_a_format_has_it() -> None:
    made = TensorFormat((2, 3), torch.int16, False).empty(torch.device("cpu"))
    assert (made.shape, made.dtype) == ((2, 3), torch.int16)


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_not_a_header_are_refused(data: bytes) -> None:
    with pytest.raises(BoundaryError, match="an invalid header"):
        Format.from_bytes(data)


@given(st.lists(json_values, max_size=3), json_values.map(json.dumps))
def test_headers_with_wrong_parts_are_refused_or_right(leaves: list[Any], structure: str) -> None:
    try:
        form = Format.from_bytes(json.dumps([structure, leaves]).encode())
    except BoundaryError:
        return
    assert Format.from_bytes(form.to_bytes()) == form


@pytest.mark.parametrize(
    "leaf",
    [
        [[-1], "float32", False, False],
        [[True], "float32", False, False],
        [[1.0], "float32", False, False],
        [[float("inf")], "float32", False, False],
        [["2"], "float32", False, False],
        [[2**40, 2**40], "float32", False, False],
        [[0, 2**60], "float32", False, False],
        [2, "float32", False, False],
        [[2], "Tensor", False, False],
        [[2], ["float32"], False, False],
        [[2], "float32", 1, False],
        [[2], "int64", True, False],
        [[2], "float32", True, 1],
        [[2], "float32", False, True],
        [[2], "float32", False],
        "T",
    ],
)
def test_an_invalid_tensor_format_is_refused(leaf: object) -> None:
    with pytest.raises(BoundaryError, match="not a valid tensor format"):
        Format.from_bytes(json.dumps(['"T"', [leaf]]).encode())


def test_a_wrong_number_of_tensors_is_refused() -> None:
    leaf = [[2], "float32", False, False]
    with pytest.raises(BoundaryError, match="a tree of 2 tensors came with 1"):
        Format.from_bytes(json.dumps(['["t", ["T", "T"]]', [leaf]]).encode())


@pytest.mark.parametrize("data", [b"[" * 100_000, b'["' + b"[" * 100_000 + b'", []]'])
def test_json_that_is_nested_too_deeply_is_refused(data: bytes) -> None:
    with pytest.raises(BoundaryError, match="an invalid header"):
        Format.from_bytes(data)
