"""Losses that change between steps or microbatches are right or refused, but never wrong.

In most steps a loss is only seen to have the graph that it had before, so what changes without a
change of the first graph was weighed like the steps before it.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own custom
from torch import nn

import penstock as ps

CLASSES, ROWS, IGNORED = 7, 16, -100
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def outcomes(
    loss: Loss, targets: Sequence[torch.Tensor], *, begin: Callable[[int], None] | None = None
) -> list[str]:
    """Train a step for each target; say whether it was as in the unsplit model, or refused."""
    torch.manual_seed(0)
    model = nn.Linear(5, CLASSES, dtype=torch.float64)
    stage = deepcopy(model)
    pipeline = ps.Pipeline([stage], "1F1B", microbatches=4, loss=loss)
    found = []
    for number, target in enumerate(targets):
        if begin is not None:
            begin(number)
        x = torch.randn(ROWS, 5, dtype=torch.float64)
        expected = loss(model(x), target.clone())
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        stage.zero_grad()
        try:
            given = pipeline.step(x, target=target.clone()).loss
        except ps.PenstockError:
            found.append("refused")
            continue
        pairs = zip(stage.parameters(), gradients, strict=True)
        is_right = given == pytest.approx(expected.item(), rel=1e-9) and all(
            parameter.grad is not None and torch.allclose(parameter.grad, gradient, 1e-9, 1e-12)
            for parameter, gradient in pairs
        )
        found.append("right" if is_right else "wrong")
    return found


def labels(last: int = 1, *, ignored: slice = slice(0)) -> torch.Tensor:
    """Return labels between 1 and 5, the last one as given, with some that are ignored."""
    found = torch.arange(ROWS) % 5 + 1
    found[-1] = last
    found[ignored] = IGNORED
    return found


def by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = target != IGNORED
    chosen = output.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    return -(chosen * mask).sum() / mask.sum()


def test_labels_that_a_loss_changes_are_noticed_beside_a_loss_of_another_form() -> None:
    # The last microbatch made the counts of the others be forgotten before they were compared.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target = target.masked_fill(target == 0, IGNORED)
        return F.cross_entropy(output, target) if target[-1] != 6 else by_hand(output, target)

    odd = labels(6)
    odd[:2] = 0
    assert outcomes(loss, [labels(), labels(), odd]) == ["right", "right", "refused"]


def test_a_batch_without_labels_may_have_a_loss_of_its_own() -> None:
    # The labels were counted before a loss existed that could have left them out.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        is_empty = bool((target == IGNORED).all())
        return output.sum() * 0.0 if is_empty else F.cross_entropy(output, target)

    nothing = labels(ignored=slice(None))
    steps = [labels(), labels(), nothing, labels(), labels(), nothing, labels()]
    assert outcomes(loss, steps) == ["right"] * 7


@pytest.mark.parametrize("others", [F.cross_entropy, by_hand], ids=["one form", "two forms"])
def test_a_form_that_only_some_microbatches_have_is_weighed_or_refused(others: Loss) -> None:
    # Microbatches that were weighed by counts came before one that was weighed by rows.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        is_whole = bool((target != IGNORED).all())
        return F.cross_entropy(output, target) if is_whole else others(output, target)

    found = outcomes(loss, [labels(), labels(), labels(ignored=slice(-2, None))])
    assert found == ["right", "right", "right" if others is F.cross_entropy else "refused"]


def test_a_masked_mean_beside_a_known_loss_is_refused_where_labels_are_uneven() -> None:
    # A known part of the loss had been taken for all of it.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = target != IGNORED
        penalty = (output.logsumexp(-1).square() * mask).sum() / mask.sum()
        return F.cross_entropy(output, target) + 0.1 * penalty

    uneven = labels(ignored=slice(-2, None))
    assert outcomes(loss, [labels(), labels(), uneven, uneven, uneven]) == [
        "right",
        "right",
        "refused",
        "refused",
        "refused",
    ]


def test_class_weights_that_drift_are_noticed() -> None:
    # Their sums were compared as if they were of single precision.
    weights = torch.ones(CLASSES, dtype=torch.float64)
    drift = 1e-6 * torch.arange(CLASSES, dtype=torch.float64)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight=weights.clone())

    def begin(number: int) -> None:
        weights.add_(drift * (number > 1))

    assert "wrong" not in outcomes(loss, [labels(n % 5 + 1) for n in range(7)], begin=begin)
