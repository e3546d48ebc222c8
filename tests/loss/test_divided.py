"""Losses that a model divides by a count of its own are those of the unsplit model, or refused."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.ranks.faults import StepFailedError

WIDTH = 6
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def squares(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (rows - wanted).square()


def over_mask(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (squares(rows, wanted) * mask).sum() / mask.sum()


def unreduced(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # As models of masked pictures do.
    each = functional.l1_loss(rows, wanted, reduction="none")
    return (each * mask).sum() / (mask.sum() + 1e-12) / 3


def times(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total = (squares(rows, wanted) * mask).sum()
    total /= 2 * mask.sum()
    return 0.5 * total


def by_numbers(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return squares(rows, wanted).sum() / (len(mask) * 4.0)


def over_sizes(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Not what the mask counts, though its first microbatch has as many.
    return (squares(rows, wanted) * mask).sum() / mask.numel()


def chosen(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return squares(rows, wanted)[mask.bool()].mean()


def by_hand_counted(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Plain numbers do not show that they count something.
    return (squares(rows, wanted) * mask).sum() / (1 + int(mask.sum()))


def beside_a_mean(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Both have weights of their own, but nothing shows the value of either.
    return over_mask(rows, wanted, mask) + 0.1 * rows.square().mean()


def without_nan(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return squares(rows, wanted).masked_fill(mask == 0, torch.nan).nanmean()


def mean_over_share(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (squares(rows, wanted) * mask).mean() / mask.double().mean()


def two_sums(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return by_numbers(rows, wanted, mask) - 0.1 * rows.abs().sum() / len(rows)


def weighted(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return -0.3 * over_mask(rows, wanted, mask)


def enlarged(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (squares(rows, wanted) * mask).sum() * 1e4 / mask.sum()


def looped(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    each = zip(rows, wanted, mask, strict=True)
    return sum((over_mask(*row) for row in each), torch.zeros(())) / len(rows)


def indexed(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = squares(rows, wanted)
    each = [found[i][mask[i].bool()].mean() for i in range(len(rows))]
    return 2.0 * torch.stack(each).sum() / len(rows) + sum(each) / len(rows)


def looped_over_all(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # The rows of all microbatches are divided by one count, which no term shows to be theirs.
    each = (squares(rows, wanted) * mask).unbind()
    return sum((row.sum() for row in each), torch.zeros(())) / mask.sum()


def from_one(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return 1 - over_mask(rows, wanted, mask)


def overlap(rows: torch.Tensor, _: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # A ratio of two sums over the batch, which was weighed by rows without an error.
    found = rows.sigmoid()
    return 1 - 2 * (found * mask).sum() / (found.sum() + mask.sum())


def tiny(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (squares(rows, wanted) * mask).sum() / (1e-6 * wanted.abs().sum())


def spread(rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (squares(rows, wanted) * mask).sum() / wanted.abs().sum()


class Divides(nn.Module):
    """Computes its loss by itself."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.loss = loss

    def forward(self, rows: torch.Tensor, wanted: torch.Tensor, mask: torch.Tensor) -> Any:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return {"loss": self.loss(rows, wanted, mask)}


def make_batch(first: int, dtype: torch.dtype = torch.bool) -> dict[str, Any]:
    """Return a batch whose first microbatch has all of its rows masked, half of them, or none."""
    generator = torch.Generator().manual_seed(1)
    rows, wanted = torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)
    counts = torch.tensor([first, first, 1, 2, 6, 4, 0, 5])
    return {
        "rows": rows,
        "wanted": wanted,
        "mask": (torch.arange(WIDTH) < counts[:, None]).to(dtype),
    }


def make_pipeline(model: nn.Module, group: Any = None, microbatches: int = 4) -> ps.Pipeline:
    kind = next(model.parameters()).dtype
    example = {name: value.to(kind) for name, value in make_batch(3).items()}
    pipe = ps.split(model, layers="layers", stages=2, example=(), example_kwargs=example)
    return ps.Pipeline(
        pipe, "1F1B", ranks=2, microbatches=microbatches, loss=ps.find_loss, group=group
    )


def assert_like_unsplit(loss: Loss, batch: dict[str, Any], microbatches: int = 4) -> None:
    model = Divides(loss)
    plain, pipeline = deepcopy(model), make_pipeline(model, microbatches=microbatches)
    expected = plain(**batch)["loss"]
    expected.backward()
    assert pipeline.evaluate(**batch).loss == pytest.approx(expected.item(), rel=1e-10)
    for _ in range(4):
        pipeline.zero_grad()
        assert pipeline.step(**batch).loss == pytest.approx(expected.item(), rel=1e-10)
        found = [parameter.grad for parameter in model.parameters()]
        reference = [parameter.grad for parameter in plain.parameters()]
        torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-12)
    assert pipeline.evaluate(**batch).loss == pytest.approx(expected.item(), rel=1e-10)


# Each microbatch divided by its own count, and counted by its rows in the loss of the batch.
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("first", [0, 3, WIDTH])
def test_a_sum_divided_by_what_a_mask_counts_is_that_of_the_unsplit_model(
    first: int, dtype: torch.dtype
) -> None:
    for loss in (over_mask, unreduced, times, chosen, without_nan) if first else (unreduced,):
        assert_like_unsplit(loss, make_batch(first, dtype))


@pytest.mark.parametrize("loss", [by_numbers, over_sizes, two_sums])
def test_sums_divided_by_sizes_are_means_over_rows(loss: Loss) -> None:
    assert_like_unsplit(loss, make_batch(WIDTH))


# A factor, such as the weight or the sign of a loss, was taken for a part of the count. A large
# one made all divisors so small that any of them seemed alike, and the loss was weighed by rows.
@pytest.mark.parametrize("loss", [weighted, enlarged, from_one])
def test_factors_do_not_belong_to_counts(loss: Loss) -> None:
    assert_like_unsplit(loss, make_batch(3))


# The divisors of single rows were taken for those of whole microbatches: refused, or of wrong
# weights where a microbatch has one row.
@pytest.mark.parametrize("microbatches", [3, 4, 8])
@pytest.mark.parametrize("loss", [looped, indexed])
def test_a_loop_over_rows_is_a_mean_over_rows(loss: Loss, microbatches: int) -> None:
    batch = make_batch(3)
    batch["mask"][6, 0] = True
    assert_like_unsplit(loss, batch, microbatches)


# A sum of bfloat16 is a multiple of 4 from 512 on: the model divides by 600, and not by 601.
def test_counts_are_compared_as_exactly_as_the_type_of_the_loss_allows() -> None:
    model = Divides(lambda rows, wanted, mask: over_mask(rows, wanted, mask.to(rows))).bfloat16()
    batch = {name: value.repeat_interleave(100, 0) for name, value in make_batch(3).items()}
    batch["mask"][0, 3] = True
    kind = torch.bfloat16
    batch |= {"rows": batch["rows"].to(kind), "wanted": batch["wanted"].to(kind)}
    expected = deepcopy(model)(**batch)["loss"]
    assert make_pipeline(model).step(**batch).loss == pytest.approx(expected.item(), rel=0.01)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_loop_over_rows_that_are_divided_together_is_refused(microbatches: int) -> None:
    pipeline = make_pipeline(Divides(looped_over_all), microbatches=microbatches)
    with pytest.raises(StepFailedError, match="what a model divides its loss by must be"):
        pipeline.step(**make_batch(3))


@pytest.mark.parametrize(
    "loss", [spread, tiny, overlap, by_hand_counted, beside_a_mean, mean_over_share]
)
def test_other_divisors_are_refused(loss: Loss) -> None:
    pipeline = make_pipeline(Divides(loss))
    for run in (pipeline.step, pipeline.evaluate):
        with pytest.raises(StepFailedError, match="what a model divides its loss by must be"):
            run(**make_batch(3))
