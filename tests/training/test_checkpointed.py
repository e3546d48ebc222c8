"""A plan that wants stages checkpointed gets them so."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError
from penstock.ir.placement import Placement
from penstock.parallel.replica import replica_of
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.choices import Choices
from penstock.step.stage import Stage


class Counted(nn.Module):
    def __init__(self, number: int, runs: Counter[int]) -> None:
        super().__init__()
        self.layer, self.number, self.runs = nn.Linear(4, 4), number, runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs[self.number] += 1
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("family", ["1F1B", "ZB-H1"])
def test_checkpointed_stages_run_twice_and_gradients_are_exact(family: str) -> None:
    torch.manual_seed(0)
    runs: Counter[int] = Counter()
    stages = [Counted(number, runs).double() for number in range(3)]
    plain = nn.Sequential(*(copy.deepcopy(stage.layer) for stage in stages))
    problem = SchedulingProblem.of(ps.Costs(), Placement.loop(3), 4)
    schedule = ps.build(family, ranks=3, microbatches=4)
    plan = Plan(problem, schedule, 1.0, Choices(sizes=(1, 1, 1), checkpointed=(0, 2)))
    pipeline = ps.Pipeline(stages, plan, loss=nn.functional.mse_loss)
    x, target = torch.randn(2, 8, 4, dtype=torch.float64)
    pipeline.step(x, target=target)
    assert runs == {0: 8, 1: 4, 2: 8}
    value = x
    for layer in plain:
        value = torch.tanh(layer(value))
    torch.autograd.backward(nn.functional.mse_loss(value, target))
    found = [p.grad for stage in stages for p in stage.parameters()]
    torch.testing.assert_close(found, [p.grad for p in plain.parameters()], rtol=1e-12, atol=1e-12)


def test_a_checkpointed_stage_is_not_captured() -> None:
    module = nn.Linear(2, 2)
    stage = Stage(0, module, replica_of(module))
    stage.checkpoint()
    with pytest.raises(ArgumentError, match="stage 0 is checkpointed"):
        stage.capture_graphs()


def test_cuda_graphs_without_cuda_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"cuda_graphs needs stages on a CUDA device \(device: cpu\)"
    ):
        ps.Pipeline(
            [nn.Linear(2, 2)], "GPipe", microbatches=2, options=ps.RunOptions(cuda_graphs=True)
        )
