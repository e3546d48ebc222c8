"""Batches into microbatches and back."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BatchError
from penstock.step.microbatches import (
    Along,
    Ready,
    Shared,
    count_rows,
    merge_outputs,
    split_batch,
)


class Pair(NamedTuple):
    x: Any
    y: Any


def plain(value: Any) -> Any:
    """Tensors as nested lists, so that whole trees compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return type(value)(*items) if hasattr(value, "_make") else type(value)(items)
    return value


def test_rows_that_do_not_divide_go_to_the_first_microbatches() -> None:
    parts = split_batch(torch.arange(10), 4)
    assert plain(parts) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2))
def test_splitting_and_merging_is_the_identity(rows: int, microbatches: int, dim: int) -> None:
    microbatches = min(rows, microbatches)
    shape = [2, 2, 2]
    shape[dim] = rows
    x = torch.arange(rows * 4).reshape(shape)
    parts = split_batch(Along(x, dim), microbatches)
    sizes = [part.shape[dim] for part in parts]
    assert len(parts) == microbatches
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    joined = merge_outputs(parts, lambda tensors: torch.cat(tensors, dim))
    assert torch.equal(joined, x)


def test_trees_are_split_inside_and_keep_their_types() -> None:
    x, y = torch.arange(2), torch.arange(2) + 10
    parts = split_batch({"a": [x, Pair(y, 3)], "b": (None, "s", torch.tensor(7))}, 2)
    assert plain(parts) == [
        {"a": [[0], Pair([10], 3)], "b": (None, "s", 7)},
        {"a": [[1], Pair([11], 3)], "b": (None, "s", 7)},
    ]


def test_wrappers_work_inside_a_tree() -> None:
    batch = {
        "x": torch.arange(2),
        "y": Along(torch.arange(4).reshape(2, 2), 1),
        "mask": Shared(torch.arange(3)),
        "lengths": Ready([5, 7]),
        "empty": {},
    }
    assert plain(split_batch(batch, 2)) == [
        {"x": [0], "y": [[0], [2]], "mask": [0, 1, 2], "lengths": 5, "empty": {}},
        {"x": [1], "y": [[1], [3]], "mask": [0, 1, 2], "lengths": 7, "empty": {}},
    ]
    assert count_rows(batch) == 2


def test_a_mapping_of_any_kind_becomes_a_dict() -> None:
    parts = split_batch(OrderedDict(x=torch.arange(2)), 2)
    assert [type(part) for part in parts] == [dict, dict]
    assert plain(parts) == [{"x": [0]}, {"x": [1]}]


def test_parts_are_views() -> None:
    x = torch.zeros(4, 2)
    split_batch(x, 2)[1].fill_(1)
    assert x.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_other_values_are_given_to_every_microbatch() -> None:
    thing = object()
    assert split_batch(thing, 3) == [thing] * 3


@pytest.mark.parametrize(
    ("value", "microbatches", "message"),
    [
        (
            torch.ones(3, 2),
            4,
            "a tensor of shape (3, 2) has 3 rows for 4 microbatches; use at most 3 microbatches, "
            "or wrap it in Shared",
        ),
        (
            torch.ones(0),
            1,
            "a tensor of shape (0,) has 0 rows for 1 microbatches; use at most 0 microbatches, "
            "or wrap it in Shared",
        ),
        (
            {"x": torch.ones(8, 2), "y": torch.ones(4)},
            2,
            "tensors of shapes (8, 2) and (4,) would be split together, but have 8 and 4 rows; "
            "wrap what is not split by rows in Shared or Along",
        ),
        (
            [torch.ones(8), Along(torch.ones(8, 6), 1)],
            2,
            "tensors of shapes (8,) and (8, 6) would be split together, but have 8 and 6 rows; "
            "wrap what is not split by rows in Shared or Along",
        ),
        (Along(torch.ones(4), 1), 2, "a tensor of shape (4,) has no dimension 1 to split"),
        (Ready([1, 2, 3]), 2, "Ready must have one item per microbatch (got 3 for 2)"),
    ],
)
def test_what_cannot_be_split_is_refused(value: Any, microbatches: int, message: str) -> None:
    with pytest.raises(BatchError) as caught:
        split_batch(value, microbatches)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (torch.ones(3, 5), 3),
        (Along(torch.ones(3, 5), 1), 5),
        (Along(torch.ones(3, 5), -1), 5),
        ([torch.tensor(1.0), {"x": torch.ones(4)}], 4),
        ((Shared(torch.ones(9)), torch.ones(2)), 2),
        (Shared(torch.ones(3)), None),
        (Ready([torch.ones(3)]), None),
        (torch.tensor(1.0), None),
        ("text", None),
    ],
)
def test_rows_are_those_of_the_first_tensor_that_is_split(value: Any, rows: int | None) -> None:
    assert count_rows(value) == rows


def test_outputs_are_put_together_along_the_rows() -> None:
    outputs = [
        {"y": torch.zeros(2, 1), "loss": torch.tensor(1.0), "n": 3, "none": None},
        {"y": torch.ones(1, 1), "loss": torch.tensor(2.0), "n": 3, "none": None},
    ]
    assert plain(merge_outputs(outputs)) == {
        "y": [[0], [0], [1]],
        "loss": [1, 2],
        "n": 3,
        "none": None,
    }


def test_a_reducer_replaces_how_tensors_are_put_together() -> None:
    outputs = [(torch.tensor(1.0), "s"), (torch.tensor(2.0), "s")]
    merged = merge_outputs(outputs, lambda tensors: torch.stack(tensors).sum())
    assert plain(merged) == (3.0, "s")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "merge_outputs needs at least one output (got none)"),
        (
            [{"n": 1}, {"n": 1}, {"n": True}],
            "the outputs of microbatches 0 and 2 differ in structure or constants: "
            '["d", [["n", ["c", 1]]]] and ["d", [["n", ["c", true]]]]; let the last stage return '
            "the same for every microbatch, or ask for no outputs",
        ),
        (
            [torch.ones(1), (torch.ones(1),)],
            "the outputs of microbatches 0 and 1 differ in structure or constants: "
            '"T" and ["t", ["T"]]; let the last stage return the same for every microbatch, or '
            "ask for no outputs",
        ),
        (
            [torch.ones(2, 5), torch.ones(2, 17)],
            "outputs of shapes [(2, 5), (2, 17)] do not fit together along dimension 0; give "
            "Pipeline(merge=...) a function that joins them, or ask for no outputs",
        ),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(outputs: list[Any], message: str) -> None:
    with pytest.raises(BatchError) as caught:
        merge_outputs(outputs)
    assert str(caught.value) == message


def test_a_constant_that_is_not_a_number_agrees_with_itself() -> None:
    merged = merge_outputs([[float("nan")], [float("nan")]])
    assert repr(merged) == "[nan]"
