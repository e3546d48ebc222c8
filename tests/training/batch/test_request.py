"""Requests of one form, which are described once."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.training.batch.request import StepRequest


def request(*args: Any, target: Any = None, **kwargs: Any) -> StepRequest:
    return StepRequest(True, 2, args, kwargs, target, False, False, 1.0)


ROWS, MORE = torch.ones(4, 2), torch.ones(6, 2)


def test_requests_with_tensors_of_the_same_form_have_one_form() -> None:
    first, again = request(ROWS, target=ROWS), request(2 * ROWS, target=3 * ROWS)
    assert first.form == again.form
    assert first.form is not None


@pytest.mark.parametrize(
    "other",
    [
        request(MORE, target=ROWS),
        request(ROWS.double(), target=ROWS),
        request(ROWS),
        request(ROWS, scale=ROWS),
        request(x=ROWS, target=ROWS),
    ],
)
def test_other_shapes_types_and_names_are_other_forms(other: StepRequest) -> None:
    assert other.form != request(ROWS, target=ROWS).form


def test_recording_no_gradients_is_another_form() -> None:
    form = request(ROWS).form
    with torch.no_grad():
        assert request(ROWS).form != form


def test_anything_but_plain_tensors_has_no_form() -> None:
    assert request([ROWS]).form is None
    assert request(ROWS, scale=2).form is None
    assert request(nn.Parameter(ROWS)).form is None


def test_a_refused_step_does_not_change_what_is_said_of_later_ones() -> None:
    pipeline = ps.Pipeline([nn.Linear(2, 2)], "1F1B", microbatches=2, loss=nn.MSELoss())
    for _ in range(2):
        assert pipeline.step(ROWS, target=ROWS).loss is not None
        with pytest.raises(ps.errors.BatchError, match="rows"):
            pipeline.step(ROWS, target=MORE)
        with torch.no_grad(), pytest.raises(ps.errors.PipelineError, match="no_grad"):
            pipeline.step(ROWS, target=ROWS)
