"""Weights of the microbatches' losses."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BatchError
from penstock.training.weights import weigh_losses, weigh_rows


def test_a_mean_weighs_by_rows() -> None:
    assert weigh_losses("mean", [], [3, 3, 2, 2]) == [0.3, 0.3, 0.2, 0.2]


def test_a_sum_weighs_nothing() -> None:
    assert weigh_losses("sum", [], [3, 3, 2]) == [1.0, 1.0, 1.0]


def test_counts_weigh_by_what_is_counted_in_the_targets() -> None:
    assert weigh_losses(len, ["abc", "", "d"], [1, 1, 1]) == [0.75, 0.0, 0.25]


def test_without_targets_rows_stand_in_for_counts() -> None:
    assert weigh_losses(len, [], [1, 3]) == [0.25, 0.75]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_shares_add_up_to_one(rows: list[int]) -> None:
    assert math.isclose(math.fsum(weigh_rows(rows)), 1.0, rel_tol=1e-12)


def test_weighed_token_means_add_up_to_the_mean_over_all_tokens() -> None:
    logits = torch.randn(28, 5, dtype=torch.float64)
    target = torch.randint(5, (28,))
    sizes = [1, 2, 3, 4, 5, 6, 7]
    target[torch.rand(28) < 0.3] = -100
    target[[0, 1, 3, 6]] = 0
    expected = F.cross_entropy(logits, target)
    targets = torch.split(target, sizes)
    weights = weigh_losses(lambda part: int((part != -100).sum()), targets, sizes)
    parts = [
        weight * F.cross_entropy(part, answer)
        for weight, part, answer in zip(weights, torch.split(logits, sizes), targets, strict=True)
        if weight
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), expected, rtol=1e-12, atol=1e-12)


def _always(count: float) -> Any:
    return lambda _: count


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan, math.inf])
def test_counts_that_weigh_nothing_are_refused(count: float) -> None:
    with pytest.raises(BatchError) as caught:
        weigh_losses(_always(count), ["a", "b"], [1, 1])
    assert str(caught.value) == (
        f"the counts of the microbatches are {[count, count]}; one at least must be positive, "
        "and none negative or infinite"
    )


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(BatchError, match=r"the rows of the microbatches are \[0, 0\]"):
        weigh_rows([0, 0])


def test_another_reduction_is_refused() -> None:
    with pytest.raises(BatchError, match="got 'median'"):
        weigh_losses("median", [], [1])  # type: ignore[arg-type]  # what is tested
