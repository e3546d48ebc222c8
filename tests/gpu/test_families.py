"""Gradients of every family over both transports, compared with the unsplit model every step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.training.options import TransportChoice
from tests.gpu.problems import (
    EQUAL,
    LOOPED,
    PLAIN,
    V_SHAPED,
    Twin,
    closing,
    make_batch,
    make_blocks,
    widths_of,
)
from tests.models import make_stages, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu

# What is wrong, by family and step; nothing should be.
Wrong = dict[str, dict[str, float]]
GROUPS = {"plain": PLAIN, "looped": LOOPED, "V": V_SHAPED}


def train_all(
    rank: int,
    families: Sequence[str],
    device: torch.device,
    are_equal: bool,
    gives_device: bool,
    transport: TransportChoice,
) -> Wrong:
    """Steps of every family: the same shapes again, others, the first ones, and uneven ones."""
    del rank
    wrong: Wrong = {}
    for family in families:
        for name, far in train_one(family, device, are_equal, gives_device, transport).items():
            if far:
                wrong[f"{family}, {name}"] = far
    return wrong


def train_one(
    family: str,
    device: torch.device,
    are_equal: bool,
    gives_device: bool,
    transport: TransportChoice,
) -> Wrong:
    ranks = dist.get_world_size()
    blocks = make_blocks(widths_of(4 * ranks, are_equal=are_equal), device)
    twin = Twin.of(nn.Sequential(*blocks))
    chosen: dict[str, Any] = {"device": device} if gives_device else {}
    rows, count = 4 * ranks, 2 * ranks
    shapes = [(rows,), (rows,), (rows, 3), (rows, 3), (rows,), (rows + 1,), (rows,)]
    wrong: Wrong = {}
    pipeline = ps.Pipeline(
        make_stages(family, ranks, blocks),
        family,
        microbatches=count,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(transport=transport if device.type == "cuda" else "auto"),
        **chosen,
    )
    with closing(pipeline):
        for number, shape in enumerate(shapes):
            batch, target = make_batch((*shape, EQUAL), number, device)
            wrong[f"step {number}"] = twin.step(pipeline, batch, target)
            if number in (0, 3):
                other = make_batch((rows + 2, EQUAL), 20 + number, device)
                wrong[f"evaluation {number}"] = twin.evaluate(pipeline, *other)
    return wrong


@pytest.mark.parametrize("transport", ["peer memory", "nccl"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("are_equal", [True, False], ids=["equal widths", "other widths"])
def test_two_ranks_have_the_gradients_of_the_unsplit_model_after_every_step(
    two_ranks: Processes,
    accelerator: torch.device,
    group: str,
    are_equal: bool,
    transport: TransportChoice,
) -> None:
    # Over NCCL the first step with new shapes was wrong wherever a channel carries activations
    # and gradients: receives of the ones were put off, and not those of the others.
    job = (GROUPS[group], accelerator, are_equal, are_equal, transport)
    assert two_ranks.run(train_all, *job, seconds=150.0) == [{}] * 2


@pytest.mark.parametrize("transport", ["peer memory", "nccl"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("are_equal", [True, False], ids=["equal widths", "other widths"])
def test_four_ranks_have_the_gradients_of_the_unsplit_model_after_every_step(
    four_ranks: Processes,
    accelerator: torch.device,
    group: str,
    are_equal: bool,
    transport: TransportChoice,
) -> None:
    job = (GROUPS[group], accelerator, are_equal, are_equal, transport)
    assert four_ranks.run(train_all, *job, seconds=180.0) == [{}] * 4


# ---- values that skip stages

FLOW = ps.Dataflow(4, [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (1, 3)])
FLOW_WIDTHS = (24, 8, 20, EQUAL)


class Mix(nn.Module):
    """A stage that takes in the values of several others, each of another width."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.layer = nn.Linear(before, after, dtype=torch.float64)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.cat(values, dim=-1)))


class Skipping(nn.Module):
    """The unsplit model of these stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = nn.ModuleList(
            Mix(sum(FLOW_WIDTHS[p] for p in FLOW.producers(stage)) or EQUAL, FLOW_WIDTHS[stage])
            for stage in range(4)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        for number, stage in enumerate(self.stages):
            values = [made[producer] for producer in FLOW.producers(number)] or [batch]
            made.append(stage(*values))
        return made[-1]


def train_skipping(rank: int, families: Sequence[str], device: torch.device) -> Wrong:
    del rank
    wrong: Wrong = {}
    for family in families:
        twin = Twin.of(Skipping().to(device))
        schedule = ps.build(family, ranks=dist.get_world_size(), microbatches=4)
        pipeline = ps.Pipeline(
            [*twin.model.get_submodule("stages").children()],
            replace(schedule, dataflow=FLOW),
            loss=mean_loss,
            group=dist.group.WORLD,
            device=device,
        )
        with closing(pipeline):
            for number, rows in enumerate([8, 8, 12, 8]):
                batch = make_batch((rows, EQUAL), number, device)
                if far := twin.step(pipeline, *batch):
                    wrong[f"{family}, step {number}"] = far
    return wrong


def test_values_that_skip_stages_come_to_the_right_stage_on_two_ranks(
    two_ranks: Processes, accelerator: torch.device
) -> None:
    families = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "V-Min", "DualPipeV")
    assert two_ranks.run(train_skipping, families, accelerator, seconds=120.0) == [{}] * 2


def test_values_that_skip_stages_come_to_the_right_stage_on_four_ranks(
    four_ranks: Processes, accelerator: torch.device
) -> None:
    families = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
    assert four_ranks.run(train_skipping, families, accelerator, seconds=120.0) == [{}] * 4
