"""The count of live activations, on real graphs."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import penstock as ps
from penstock.tools.verify.activations import ActivationCounter


def count(stages: list[nn.Module], family: str, microbatches: int) -> dict[int, int]:
    schedule = ps.build(family, ranks=2, microbatches=microbatches)
    counter = ActivationCounter(schedule.placement.rank_of_stage)
    pipeline = ps.Pipeline(
        stages,
        schedule,
        microbatches=microbatches,
        loss=nn.MSELoss(),
        options=ps.RunOptions(around=counter.around),
    )
    for stage in stages:
        counter.attach(stage)
    batch = torch.randn(16, 4)
    pipeline.step(batch, target=batch)
    return counter.peaks


def test_count_depends_on_the_family_and_not_on_the_microbatches() -> None:
    for microbatches in (4, 8, 16):
        stages: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]
        assert count(stages, "1F1B", microbatches) == {0: 2, 1: 1}
        assert count(stages, "GPipe", microbatches) == {0: microbatches, 1: microbatches}


def test_memory_of_the_weight_backward_counts_until_it_has_run() -> None:
    stages: list[nn.Module] = [nn.Linear(4, 4) for _ in range(2)]
    predicted = ps.simulate(ps.build("ZB-H2", ranks=2, microbatches=8)).rank_peak_activations
    assert count(stages, "ZB-H2", 8) == dict(enumerate(predicted))


def test_stage_without_a_graph_counts_by_its_actions() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    assert count([frozen, nn.Linear(4, 4)], "1F1B", 4) == {0: 2, 1: 1}


def test_graph_that_is_kept_alive_still_counts() -> None:
    class Keep(nn.Linear):
        kept: list[torch.Tensor]

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            self.kept = [*getattr(self, "kept", []), super().forward(value)]
            return self.kept[-1]

    assert count([nn.Linear(4, 4), Keep(4, 4)], "1F1B", 4) == {0: 2, 1: 4}
