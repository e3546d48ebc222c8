"""A pipeline says once that batch norms do not see the whole batch."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.training.build.batch_statistics import explain_once


def make_stages(norm: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), norm), nn.Linear(4, 4)]


@pytest.mark.parametrize(
    ("norm", "microbatches", "lines"),
    [(nn.BatchNorm1d(4), 2, 1), (nn.BatchNorm1d(4), 1, 0), (nn.LayerNorm(4), 2, 0)],
)
def test_batch_norms_of_microbatches_are_logged_once(
    norm: nn.Module, microbatches: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Losses differed from the unsplit model's, and nothing said why.
    explain_once.cache_clear()
    stages = make_stages(norm)
    for _ in range(2):
        pipeline = ps.Pipeline(stages, "1F1B", microbatches=microbatches, loss=nn.MSELoss())
        pipeline.step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert len(caplog.messages) == lines
    assert all("batch norm takes its mean and variance" in text for text in caplog.messages)
