"""Weights of the microbatches of one step, for each part that a loss may have."""

import pytest

from penstock.loss import term_weights
from penstock.loss.labels import BatchLabels
from penstock.loss.reduction import round_weights
from penstock.loss.term_weights import Given, TermWeights


def test_weights_are_rounded_once_for_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each microbatch rounded those of all: 3 ms in a step of 64, for what few schedules compare.
    rounded: list[int] = []

    def count(weights: tuple[float, ...]) -> tuple[float, ...]:
        rounded.append(len(weights))
        return round_weights(weights)

    monkeypatch.setattr(term_weights, "round_weights", count)
    rows = [1] * 8
    weights = TermWeights(
        Given(
            rows,
            BatchLabels({}),
            None,
            None,
            adds_up=False,
            makes_own=True,
            is_training=True,
            names=(),
        )
    )
    for microbatch in range(8):
        weights.by_rows(microbatch)
    assert rounded == []
    assert weights.find_used() == {(0.125,) * 8}
    assert rounded == [8]
