"""Stages of a `penstock.Pipe` in torch's own stage and schedule classes."""

import torch
from torch import nn

import penstock as ps
from penstock.dropin import PipelineStage, Schedule1F1B
from tests.processes import Processes


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()


def train_own_stage(rank: int) -> list[str]:
    model, x = make_model(), torch.randn(8, 6, dtype=torch.float64)
    model(x).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    pipe = ps.split(model, stages=2, example=[x])
    stage = PipelineStage(pipe.stages[rank], rank, pipe.num_stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, _: output.square().mean())
    schedule.step(*((x,) if rank == 0 else ()), target=x if rank == 1 else None)
    own = dict(pipe.stages[rank].named_parameters())
    torch.testing.assert_close(
        {name: p.grad for name, p in own.items()}, {name: expected[name] for name in own}
    )
    return sorted(own)


def test_traced_stages_fit_into_stage_objects(two_processes: Processes) -> None:
    names = two_processes.run(train_own_stage)
    assert names == [
        ["0.0.bias", "0.0.weight", "1.0.bias", "1.0.weight"],
        ["2.0.bias", "2.0.weight", "3.0.bias", "3.0.weight"],
    ]
