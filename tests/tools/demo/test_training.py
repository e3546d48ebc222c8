"""Training: any candidate learns what the unsplit model learns."""

import pytest

pytest.importorskip("torch")

from penstock.costs import Costs
from penstock.tools.demo.candidates import family_candidate
from penstock.tools.demo.task import Task
from penstock.tools.demo.training import (
    HeldBytes,
    TrainedStep,
    TrainingReport,
    train_pipeline,
    train_unsplit,
)

TASK = Task(ranks=2, steps=2, rows=16, length=8)


@pytest.fixture(scope="module")
def unsplit() -> list[TrainingReport]:
    reports: list[TrainingReport] = []
    train_unsplit(TASK, reports.append)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("family", ["1F1B", "ZBV", "DualPipe"])
def test_candidates_learn_what_the_unsplit_model_learns(
    family: str, unsplit: list[TrainingReport]
) -> None:
    reports: list[TrainingReport] = []
    train_pipeline(TASK, family_candidate(family, TASK, Costs(forward=[1] * 8)), reports.append)
    held = [one for one in reports if isinstance(one, HeldBytes)]
    steps = [one for one in reports if isinstance(one, TrainedStep)]
    assert reports == held + steps
    assert sorted(one.rank for one in held) == [0, 1]
    assert all(one.bytes > 0 for one in held)
    losses = [one.loss for one in unsplit if isinstance(one, TrainedStep)]
    assert [one.number for one in steps] == [1, 2]
    assert [one.loss for one in steps] == pytest.approx(losses, abs=1e-5)
    assert all(0 <= one.bubble < 1 for one in steps)
