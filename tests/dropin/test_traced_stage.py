"""Stages cut from a traced model, where values skip stages and users give some by name."""

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from penstock.dropin import schedules
from penstock.dropin._utils import PipeInfo, PipeliningMetadataError
from penstock.dropin.stage import build_stage
from tests.dropin.scripts import WIDTH, make_batch
from tests.processes import Processes

CPU = torch.device("cpu")


class Skipping(nn.Module):
    """Four layers; the first one's output is used by all others, the third's scale is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer0, self.layer1 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer2, self.layer3 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        first = self.layer0(x)
        second = self.layer1(first).tanh()
        third = self.layer2(second) * scale + first
        output: torch.Tensor = self.layer3(third) * second + first
        return output


def trace() -> tuple[nn.Module, fx.GraphModule]:
    """Return a model, and the same cut after each layer."""
    torch.manual_seed(0)
    model = Skipping().double()
    traced = fx.symbolic_trace(model)
    stage = -1

    def cut(node: fx.Node) -> int:
        nonlocal stage
        stage += node.op == "call_module"
        return stage

    return model, split_module(traced, model, cut)


def run_pipe(rank: int, name: str) -> list[str]:
    model, pipe = trace()
    info = PipeInfo(pipe.graph, 4, has_loss_and_backward=False)
    stage = build_stage(pipe.get_submodule(f"submod_{rank}"), rank, info, CPU)
    schedule_class = schedules.get_schedule_class(name)
    schedule = schedule_class(stage, 4, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
    for rows in (8, 8, 10):
        x, target = make_batch(rows)
        scale = torch.arange(1.0, rows + 1).double().view(-1, 1)
        model.zero_grad()
        stage.submod.zero_grad()
        expected = model(x, scale)
        torch.autograd.backward(nn.functional.mse_loss(expected, target, reduction="sum"))
        given: dict[str, Any] = {"scale": scale} if rank == 2 else {}
        if rank == 3:
            given["target"] = target
        output = schedule.step(*((x,) if rank == 0 else ()), **given)
        for parameter, weight in stage.submod.named_parameters():
            torch.testing.assert_close(weight.grad, model.get_parameter(parameter).grad)
        if rank == 3:
            torch.testing.assert_close(output, expected.detach())
    return [f"{number}: {stages}" for number, stages in stage.act_send_info.items()]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_values_skip_stages_and_their_gradients_come_back(
    four_processes: Processes, name: str
) -> None:
    found = four_processes.run(run_pipe, name)
    assert found == [["0: [1, 2, 3]"], ["0: [2, 3]"], ["0: [3]"], ["0: []"]]


@pytest.mark.usefixtures("alone")
def test_a_stage_knows_its_place_in_the_pipe() -> None:
    _, pipe = trace()
    info = PipeInfo(pipe.graph, 4, has_loss_and_backward=False)
    stage = build_stage(pipe.get_submodule("submod_2"), 2, info, CPU)
    assert (stage.name, stage.get_stage_index_of_submod("submod_3")) == ("submod_2", 3)
    assert (stage.sources, stage._create_act_send_info()) == ([0, 1], {0: [3]})
    with pytest.raises(PipeliningMetadataError, match="no stage runs 'other'"):
        stage.get_stage_index_of_submod("other")
    with pytest.raises(PipeliningMetadataError, match="calls 4 modules for 3 stages"):
        build_stage(pipe.get_submodule("submod_2"), 2, PipeInfo(pipe.graph, 3, False), CPU)


@pytest.mark.usefixtures("alone")
def test_schedules_of_several_stages_per_rank_refuse_skips() -> None:
    _, pipe = trace()
    info = PipeInfo(pipe.graph, 4, has_loss_and_backward=False)
    stages: list[Any] = [
        build_stage(pipe.get_submodule(f"submod_{number}"), number, info, CPU)
        for number in range(4)
    ]
    schedule = schedules.ScheduleInterleaved1F1B(stages, 2)
    with pytest.raises(RuntimeError, match="adjacent-stage communication"):
        schedule.step(make_batch(4)[0])
