"""All stages on one rank and one GPU; `tests/gpu` has them on several ranks."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock.dropin.schedules import (
    PipelineScheduleMulti,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from penstock.dropin.stage import PipelineStage
from tests.dropin.scripts import make_batch, make_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone")]


@pytest.mark.parametrize(
    "schedule_class", [ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble]
)
def test_stages_on_a_gpu_train_like_the_model(schedule_class: Any) -> None:
    device = torch.device("cuda")
    blocks = make_blocks(2).to(device)
    model = nn.Sequential(*copy.deepcopy(blocks))
    x, target = (tensor.to(device) for tensor in make_batch(8))
    torch.autograd.backward(nn.functional.mse_loss(model(x), target))
    if issubclass(schedule_class, PipelineScheduleMulti):
        stages: Any = [PipelineStage(block, i, 2, device) for i, block in enumerate(blocks)]
    else:
        stages = PipelineStage(nn.Sequential(*blocks), 0, 1, device)
    schedule = schedule_class(stages, 4, loss_fn=nn.functional.mse_loss)
    for _ in range(3):
        blocks.zero_grad()
        output = schedule.step(x, target=target)
    torch.testing.assert_close(output, model(x).detach())
    torch.testing.assert_close(
        [weight.grad for weight in blocks.parameters()],
        [weight.grad for weight in model.parameters()],
    )
