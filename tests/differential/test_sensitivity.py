"""The plain model's own rounding is no finding, and it hides none: planted defects are found."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from penstock.deferred.linear import LayerCall
from tests.differential.batches import Batch
from tests.differential.case import Block, Case, Order, Part, Step
from tests.differential.checking import check_case
from tests.differential.comparing import differences
from tests.differential.drawing import draw_case
from tests.differential.observed import Numbers
from tests.differential.running import run_unsplit
from tests.differential.sensitivity import Nudge, spread_of

# A row of equal numbers has no variance: what is left of its gradient behind a norm is rounding.
CANCELLING = Case(
    20261118006272,
    (Part(sends="expanded"), Part((Block("layer_norm"),)), Part((Block("root_norm"),))),
    Order("GPipe", 3, microbatches=2),
    steps=(Step(length=0),),
)
PLAIN = Case(5, (Part((Block("linear"),)), Part((Block("matmul"),))), Order("ZB-H1", 2, 1, 2))
# Both were found as wrong numbers: the one cancels, the other diverges in its third step.
SENSITIVE = (20261118006272, 20261118012099)


def test_a_gradient_that_is_only_rounding_is_not_a_finding() -> None:
    assert check_case(CANCELLING) is None


def test_spread_is_rounding_where_nothing_cancels() -> None:
    expected = run_unsplit(PLAIN)
    spread = spread_of(PLAIN, expected)
    assert set(spread) == set(expected)
    for name, value in expected.items():
        assert value is None or spread[name] <= 1e-13 * float(value.abs().max())
    assert any(spread.values())


def test_spread_shows_what_cancels() -> None:
    name = "step 0: gradient 1.core.blocks.0.inner.layer.weight"
    expected = run_unsplit(CANCELLING)
    value = expected[name]
    assert value is not None
    assert spread_of(CANCELLING, expected)[name] >= 0.1 * float(value.abs().max())


def test_a_nudge_is_a_few_roundings_and_the_same_every_time() -> None:
    numbers = torch.randn(100, dtype=torch.float64, requires_grad=True)
    moved = Nudge(1).move(numbers)
    assert moved.requires_grad
    assert torch.equal(moved, Nudge(1).move(numbers))
    assert not torch.equal(moved, Nudge(2).move(numbers))
    torch.testing.assert_close(moved, numbers, rtol=1e-15, atol=0)
    words = torch.arange(3)
    assert Nudge(1).move(words) is words


def test_a_spread_allows_no_more_than_a_few_times_itself() -> None:
    name = "step 0: gradient a"
    expected: Numbers = {name: torch.ones(2, dtype=torch.float64)}
    for error, spread, is_found in (
        (1e-6, 0.0, True),
        (1e-6, 1e-7, False),
        (1e-4, 1e-7, True),
        (1.0, 1e-3, True),
        (torch.nan, 1e-3, True),
    ):
        found: Numbers = {name: torch.full((2,), 1 + error, dtype=torch.float64)}
        assert bool(differences(found, expected, {name: spread})) == is_found
    assert list(differences({name: None}, expected, {name: 1.0})) == [name]


def test_a_step_is_not_judged_by_the_size_of_later_ones() -> None:
    # The scale was that of the whole case, so that no number counted before training diverged.
    expected: Numbers = {
        "step 0: gradient a": torch.ones(1, dtype=torch.float64),
        "step 1: gradient a": torch.full((1,), 1e30, dtype=torch.float64),
    }
    found = {**expected, "step 0: gradient a": torch.full((1,), 1.5, dtype=torch.float64)}
    assert list(differences(found, expected)) == ["step 0: gradient a"]


# ---------------------------------------------------------------- planted defects


def _leave_out_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def finish(self: LayerCall) -> None:
        calls.append(None)
        if len(calls) % 3:
            whole(self)

    whole = LayerCall.finish
    monkeypatch.setattr(LayerCall, "finish", finish)


def _change_gradients(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def finish(self: LayerCall) -> None:
        whole(self._replace(gradient=change(self.gradient)))

    whole = LayerCall.finish
    monkeypatch.setattr(LayerCall, "finish", finish)


def _change_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    _change_gradients(monkeypatch, lambda gradient: gradient * 1.001)


def _round_to_single(monkeypatch: pytest.MonkeyPatch) -> None:
    _change_gradients(monkeypatch, lambda gradient: gradient.float().double())


def _exchange_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_given(self: Batch, given: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        (inputs,), keywords = whole(self, given)
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.roll(self.rows[0], dims=0)
        else:
            inputs = {"inputs": [inputs["inputs"][0].roll(self.rows[0], dims=0)]}
        return (inputs,), keywords

    whole = Batch.as_given
    monkeypatch.setattr(Batch, "as_given", as_given)


CANCELS, DIVERGES = map(draw_case, SENSITIVE)
DEFECTS = [
    *product((PLAIN, CANCELS, DIVERGES), (_leave_out_terms, _change_factor, _round_to_single)),
    # What cancels is the same for all inputs.
    *product((PLAIN, DIVERGES), (_exchange_microbatches,)),
]


@pytest.mark.parametrize(("case", "plant"), DEFECTS)
def test_a_planted_defect_is_found(
    case: Case, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_case(case) is None
    plant(monkeypatch)
    failure = check_case(case)
    assert failure is not None
    assert failure.kind == "wrong numbers"
