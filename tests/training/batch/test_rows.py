"""The rows of microbatches, from what all arguments say."""

from typing import Any

import pytest
import torch

from penstock.errors import BatchError
from penstock.step.microbatches import Along, Ready, Shared
from penstock.training.batch.rows import BatchRows, claim_rows, merge_claims, settle_rows


def rows(count: int) -> torch.Tensor:
    return torch.ones(count, 2)


def settle(*ranks: dict[str, Any], microbatches: int = 2) -> BatchRows | None:
    return settle_rows(merge_claims([claim_rows(named, microbatches) for named in ranks]))


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"x": rows(5)}, BatchRows([3, 2])),
        ({"x": rows(1)}, BatchRows([1])),
        ({"x": Shared(rows(5))}, None),
        ({"x": 3}, None),
        # Tensors that are split come before anything ready-made, which may have other rows.
        ({"x": rows(6), "ends": Ready([rows(9), None, rows(1)])}, BatchRows([2, 2, 2])),
        ({"x": rows(6), "target": Ready([rows(2), rows(1)] * 2)}, BatchRows([2, 2, 1, 1], "")),
        # Then the target, then what agrees.
        ({"x": Ready([rows(7), rows(1)]), "target": Ready([rows(3), rows(2)])}, BatchRows([3, 2])),
        ({"x": Ready([rows(7), rows(1)]), "n": Ready([1, None])}, BatchRows([7, 1])),
        ({"x": Ready([rows(7), rows(1)]), "y": Ready([rows(7), rows(1)])}, BatchRows([7, 1])),
        ({"x": Ready([rows(7), rows(1)]), "y": Ready([rows(2), rows(1)])}, BatchRows([1, 1], "")),
        # Nothing is known: every microbatch counts the same.
        ({"x": Ready(["a", 3, None])}, BatchRows([1, 1, 1])),
        ({"x": Ready([rows(3), None])}, BatchRows([1, 1])),
        ({"x": {"a": Ready([Shared(rows(3)), rows(2)])}}, BatchRows([1, 1])),
        ({"x": Ready([(rows(3), rows(4)), (rows(1), rows(1))])}, BatchRows([1, 1])),
        ({"x": Along(Ready([rows(3).T, rows(2).T]), 1)}, BatchRows([3, 2])),
        ({"x": [Ready([rows(0), rows(2)])]}, BatchRows([0, 2])),
    ],
)
def test_rows_follow_from_what_has_them(named: dict[str, Any], expected: BatchRows | None) -> None:
    found = settle(named)
    assert (found and found.rows) == (expected and expected.rows)
    assert (found and found.doubt is None) == (expected and expected.doubt is None)


def test_a_doubt_says_what_differs() -> None:
    found = settle({"x": rows(4), "target": Ready([rows(3), rows(1)])})
    assert found == BatchRows([2, 2], "the batch has [2, 2] rows, the target [3, 1]")
    found = settle({"x": Ready([rows(7), rows(1)]), "y": Ready([rows(2), rows(1)])})
    assert found == BatchRows([1, 1], "the ready-made rows differ: x [7, 1], y [2, 1]")


def test_ranks_are_settled_together() -> None:
    assert settle({"x": rows(5)}, {}, {"target": Ready([rows(3), rows(2)])}) == BatchRows([3, 2])
    assert settle({}, {}) is None


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [{"x": rows(4)}, {"x": rows(6)}],
            "all arguments that are split must have the same number of rows (rank 0: x has 4, "
            "rank 1: x has 6); wrap what is not split by rows in Shared, Along or Ready",
        ),
        (
            [{"x": Ready([1, 2])}, {"y": Ready([1, 2, 3])}],
            "all arguments must have the same number of ready-made microbatches (rank 0: x has 2, "
            "rank 1: y has 3)",
        ),
        (
            [{"x": rows(2), "y": Ready([1, 2, 3])}],
            "x must have at least one row for each of the 3 ready-made microbatches (got 2)",
        ),
        ([{"x": Ready([])}], "x must have at least one ready-made microbatch (got 0)"),
        ([{"x": rows(0)}], "x must have at least one row (got 0)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(ranks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BatchError) as caught:
        settle(*ranks)
    assert str(caught.value) == message


def test_ranks_that_split_into_different_numbers_are_refused() -> None:
    claims = [claim_rows({"x": rows(8)}, count) for count in (2, 4)]
    with pytest.raises(BatchError, match=r"rank 0 has 2, rank 1 has 4"):
        merge_claims(claims)
