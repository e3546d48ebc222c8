"""Losses that are sums, or sums divided by a count that the model is given for the whole batch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.ranks.faults import StepFailedError

torch.manual_seed(0)
ROWS = torch.randn(8, 4, dtype=torch.float64)
# One microbatch of two rows has no label that counts.
LABELS = torch.tensor([1, -100, -100, -100, 0, 3, 2, -100])


class Counts(nn.Module):
    """Divides the sum of its losses by the count that it is given, as transformers do."""

    def __init__(self, *, beside: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.beside = beside

    def forward(self, rows: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int) -> Any:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        loss = functional.cross_entropy(rows, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss + self.beside * rows.square().mean() if self.beside else loss}


def make_pipeline(model: nn.Module) -> ps.Pipeline:
    pipe = ps.split(model, layers="layers", stages=2)
    return ps.Pipeline(pipe, "1F1B", ranks=2, microbatches=4, loss=ps.find_loss)


def test_a_counted_sum_is_recognised_without_a_step_before() -> None:
    # Without a graph only its value shows what it is, and evaluations at the start were refused.
    model = Counts(beside=0.0)
    given: dict[str, Any] = {"labels": LABELS, "num_items_in_batch": 9}
    with torch.no_grad():
        expected = model(ROWS, **given)["loss"]
    found = make_pipeline(model).evaluate(ROWS, **given).loss
    assert found == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("around", [nullcontext, torch.inference_mode], ids=["plain", "inference"])
@pytest.mark.parametrize("way", ["beside a mean", "gathered", "unreduced", "frozen"])
def test_losses_of_several_parts_may_be_evaluated_before_any_step(way: str, around: Any) -> None:
    # Only a graph shows the factors of a loss, which evaluations did not have: they were refused,
    # in words that those who evaluate through a Trainer could not follow.
    model = Counts(beside=0.5) if way in ("beside a mean", "frozen") else ByHand(way)
    pipeline = make_pipeline(model.requires_grad_(way != "frozen"))
    for labels in (LABELS.flip(0), LABELS) if isinstance(model, Counts) else (LABELS % 4,):
        given: dict[str, Any] = {"labels": labels, "num_items_in_batch": 9}
        with around():
            expected = model(ROWS, **given)["loss"].item()
            result = pipeline.evaluate(ROWS.clone(), **given)
        assert result.loss == pytest.approx(expected, rel=1e-12)
        assert not result.outputs["loss"].requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sum_is_divided_by_the_count_of_its_own_batch() -> None:
    # Evaluations divided by the count of the training step before them: 29 % off in a mixture of
    # experts that was trained with accumulation.
    model = Counts(beside=0.5)
    pipeline = make_pipeline(model)
    for run, count in ((pipeline.step, 4), (pipeline.evaluate, 9)):
        expected = model(ROWS, LABELS, count)["loss"].item()
        found = run(ROWS, labels=LABELS, num_items_in_batch=count).loss
        assert found == pytest.approx(expected, rel=1e-12)


class Spells(nn.Module):
    """Computes a loss of sequences by itself, as models of speech do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.reduction = reduction

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> Any:
        for layer in self.layers:
            rows = layer(rows)
        given, wanted = (torch.full((len(rows),), part.shape[1]) for part in (rows, labels))
        spelt = rows.log_softmax(-1).transpose(0, 1)
        loss = functional.ctc_loss(spelt, labels, given, wanted, reduction=self.reduction)
        return {"loss": loss}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_over_sequences_add_up(reduction: str) -> None:
    # The sum of ctc_loss, which speech models take by default, counted as a mean over rows.
    model = Spells(reduction)
    rows, labels = torch.randn(8, 5, 4, dtype=torch.float64), torch.randint(1, 4, (8, 2))
    expected = model(rows, labels)["loss"].item()
    example = {"rows": rows, "labels": labels}
    pipe = ps.split(model, layers="layers", stages=2, example=(), example_kwargs=example)
    pipeline = ps.Pipeline(pipe, "1F1B", ranks=2, microbatches=4, loss=ps.find_loss)
    for run in (pipeline.step, pipeline.evaluate):
        assert run(rows=rows, labels=labels).loss == pytest.approx(expected, rel=1e-12)


class ByHand(nn.Module):
    """Divides a sum, which none of torch's losses makes, by the count that it is given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.way = way

    def forward(self, rows: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int) -> Any:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        each = -rows.log_softmax(-1).gather(1, labels[:, None])
        if self.way == "unreduced":
            each = functional.cross_entropy(rows, labels, reduction="none")
        loss = each.sum() / num_items_in_batch
        if self.way == "mean":
            loss = each.mean()
        if self.way == "mixed":
            loss = loss + rows.square().mean()
        return {"loss": loss}


@pytest.mark.parametrize("way", ["gathered", "unreduced", "mean"])
def test_shares_of_a_batch_add_up_if_the_graph_alone_shows_them(way: str) -> None:
    # No call of torch's losses said that they are sums, so that they counted as means over rows:
    # loss and gradients were too small by the number of microbatches.
    model = ByHand(way)
    labels = torch.arange(8) % 4
    expected = model(ROWS, labels, 8)["loss"]
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    pipeline = make_pipeline(model)
    for _ in range(3):
        pipeline.zero_grad()
        found = pipeline.step(ROWS, labels=labels, num_items_in_batch=8).loss
        assert found == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close([p.grad for p in model.parameters()], list(gradients))
    found = pipeline.evaluate(ROWS, labels=labels, num_items_in_batch=8).loss
    assert found == pytest.approx(expected.item(), rel=1e-12)


def test_shares_beside_means_are_refused() -> None:
    # They have weights of their own, but nothing shows the value of either.
    with pytest.raises(StepFailedError, match="a loss must be a sum of what is averaged"):
        make_pipeline(ByHand("mixed")).step(ROWS, labels=torch.arange(8) % 4, num_items_in_batch=8)
