"""The classes under torch's names on several ranks of one GPU, step by step."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.dropin import schedules
from penstock.dropin.stage import PipelineStage
from tests.gpu.problems import EQUAL, make_batch, make_blocks, widths_of
from tests.models import cut, differences, gradients_of, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu

SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]


def train_classes(rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Steps of every class, an evaluation between them, and batches of another size."""
    ranks = dist.get_world_size()
    wrong = {}
    for name in (*SINGLE, *LOOPED, *V_SHAPED):
        own = stages_of(name, rank, ranks)
        last = ranks * len(own) - 1
        blocks = make_blocks(widths_of(4 * ranks, are_equal=True), device)
        parts = cut(blocks, last + 1)
        model = nn.Sequential(*parts)
        copy = deepcopy(model)
        stages = [PipelineStage(parts[i], i, last + 1, device) for i in own]
        make: Any = getattr(schedules, name)
        schedule = make(stages[0] if name in SINGLE else stages, 2 * ranks, loss_fn=mean_loss)
        for number, rows in enumerate([8, 8, 12, 8]):
            model.zero_grad(set_to_none=True)
            copy.zero_grad(set_to_none=True)
            batch, target = make_batch((rows * ranks, EQUAL), number, device)
            args = (batch,) if 0 in own else ()
            given = {"target": target} if last in own else {}
            schedule.step(*args, **given)
            torch.autograd.backward(mean_loss(copy(batch), target))
            found = gradients_of(model.named_parameters())
            expected = gradients_of(copy.named_parameters())
            held = tuple(f"{index}." for index in own)
            mine = {key: value for key, value in expected.items() if key.startswith(held)}
            if far := differences(found, mine):
                wrong[f"{name}, step {number}"] = far
            if number == 1:
                outputs = schedule.eval(*args, **given)
                if last in own:
                    torch.testing.assert_close(outputs, copy(batch).detach())
        dist.barrier()
    return wrong


def test_every_class_on_two_ranks_is_exact_in_every_step(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    assert two_ranks.run(train_classes, accelerator, seconds=120.0) == [{}] * 2


def test_every_class_on_four_ranks_is_exact_in_every_step(
    four_ranks: Processes, accelerator: torch.device
) -> None:
    assert four_ranks.run(train_classes, accelerator, seconds=120.0) == [{}] * 4
