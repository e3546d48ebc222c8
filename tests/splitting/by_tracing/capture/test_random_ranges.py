"""Comparisons with random numbers are decided where the whole range has one answer."""

from typing import Any

import pytest
import torch

from penstock.splitting.by_tracing.capture.random_ranges import (
    Range,
    decide_comparison,
    find_range,
    is_comparison,
)

UNIT, CLOSED = Range(0.0, 1.0, has_high=False), Range(-1.0, 1.0, has_high=True)
X = torch.zeros(1)


@pytest.mark.parametrize(
    ("func", "drawn", "answers"),
    # For -1.5, -1, 0, 0.5, 1 and 1.5.
    [
        (torch.lt, UNIT, "nnn?yy"),
        (torch.le, UNIT, "nn??yy"),
        (torch.gt, UNIT, "yy??nn"),
        (torch.ge, UNIT, "yyy?nn"),
        (torch.lt, CLOSED, "nn???y"),
        (torch.le, CLOSED, "n???yy"),
        (torch.Tensor.gt, CLOSED, "y???nn"),
        (torch.Tensor.__ge__, CLOSED, "yy???n"),
    ],
)
def test_a_comparison_is_decided_beyond_the_ends_of_a_range(
    func: Any, drawn: Range, answers: str
) -> None:
    shown = {True: "y", False: "n", None: "?"}
    numbers = (-1.5, -1, 0, 0.5, 1, 1.5)
    assert "".join(shown[decide_comparison(func, drawn, n)] for n in numbers) == answers
    assert decide_comparison(func, drawn, float("nan")) is None


def test_ranges_are_those_that_torch_draws_from() -> None:
    assert find_range(torch.rand, ([],), {}) == UNIT
    assert find_range(torch.rand_like, (X,), {}) == UNIT
    assert find_range(torch.Tensor.uniform_, (X,), {}) == UNIT._replace(has_high=True)
    assert find_range(torch.Tensor.uniform_, (X, -1.0), {"to": 1.0}) == CLOSED
    assert find_range(torch.Tensor.uniform_, (X, X), {}) is None
    assert find_range(torch.randn, (2,), {}) is None


def test_comparisons_are_those_with_a_number() -> None:
    assert is_comparison(torch.lt, (X, 0.5))
    assert not is_comparison(torch.lt, (X, X))
    assert not is_comparison(torch.lt, (X, True))
    assert not is_comparison(torch.add, (X, 1))
