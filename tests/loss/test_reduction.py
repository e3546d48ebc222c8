"""Weights of the microbatches' losses."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArgumentError, BatchError
from penstock.loss.reduction import require_reduction, share_counts, weigh_rows


def test_a_mean_is_weighted_by_rows() -> None:
    assert weigh_rows([3, 3, 2, 2]) == [0.3, 0.3, 0.2, 0.2]


def test_a_microbatch_that_counts_nothing_has_weight_zero() -> None:
    assert share_counts([3, 0, 1]) == [0.75, 0.0, 0.25]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_shares_add_up_to_one(rows: list[int]) -> None:
    assert math.isclose(math.fsum(weigh_rows(rows)), 1.0, rel_tol=1e-12)


def test_weighted_token_means_add_up_to_the_mean_over_all_tokens() -> None:
    logits = torch.randn(28, 5, dtype=torch.float64)
    target = torch.randint(5, (28,))
    sizes = [1, 2, 3, 4, 5, 6, 7]
    target[torch.rand(28) < 0.3] = -100
    target[[0, 1, 3, 6]] = 0
    expected = F.cross_entropy(logits, target)
    targets = torch.split(target, sizes)
    weights = share_counts([int((part != -100).sum()) for part in targets])
    parts = [
        weight * F.cross_entropy(part, answer)
        for weight, part, answer in zip(weights, torch.split(logits, sizes), targets, strict=True)
        if weight
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan, math.inf])
def test_invalid_counts_are_refused(count: float) -> None:
    with pytest.raises(BatchError) as caught:
        share_counts([count, count])
    assert str(caught.value) == (
        "the counts of the microbatches must be finite, none negative and not all of them zero "
        f"(got {[count, count]}); leave out a batch that has nothing to count"
    )


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(BatchError, match=r"not all of them zero \(got \[0, 0\]\)"):
        weigh_rows([0, 0])


def test_another_reduction_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        require_reduction("median")  # type: ignore[arg-type]  # what is tested
    assert str(caught.value) == (
        "reduction must be 'auto', 'mean', 'sum' or a function of a target or of labels (got "
        "'median'); leave it out to find it from the loss"
    )
