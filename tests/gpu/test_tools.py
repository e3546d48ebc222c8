"""Measuring, planning, recording and checkpoints on a GPU, between ranks that talk by NCCL."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from tests.gpu.problems import EQUAL, Twin, closing, make_batch, make_blocks, widths_of
from tests.models import cut, differences, mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu


def share(value: Any, device: torch.device) -> Any:
    """The value of the first rank, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=device)
    return values[0]


def plan_and_record(
    rank: int, device: torch.device, folder: Path
) -> tuple[dict[str, dict[str, float]], ps.Timeline]:
    """Measure stages and links, plan with that, train by the plan, and record a step."""
    blocks = make_blocks(widths_of(8, are_equal=False), device)
    stages: list[nn.Module] = [*cut(blocks, 4)]
    twin = Twin.of(nn.Sequential(*blocks))
    batch, target = make_batch((4, EQUAL), 0, device)
    costs = ps.measure(
        stages,
        example=(batch,),
        loss=mean_loss,
        target=target,
        repeats=3,
        device=device,
        optimizer=torch.optim.Adam,
    )
    links = ps.measure_links(
        dist.group.WORLD,  # type: ignore[arg-type]  # there is one
        device=device,
        large_bytes=1 << 18,
        repeats=3,
    )
    costs = replace(costs, transfer=links.transfer(max(costs.message_bytes)))  # type: ignore[arg-type]  # measured: one per stage
    costs = share(costs, device)
    if rank == 0:
        ps.plan(costs, ranks=2, microbatches=4, placement="v", seconds=1).to_file(
            folder / "p.json"
        )
    dist.barrier()
    plan = ps.Plan.from_file(folder / "p.json")
    pipeline = ps.Pipeline(stages, plan, loss=mean_loss, group=dist.group.WORLD, device=device)
    wrong: dict[str, dict[str, float]] = {}
    with closing(pipeline):
        for number in range(3):
            given = make_batch((16, EQUAL), number, device)
            if far := twin.step(pipeline, *given):
                wrong[f"step {number}"] = far
        batch, target = make_batch((16, EQUAL), 9, device)
        timeline = pipeline.step(batch, target=target, record=True).timeline
    assert timeline is not None
    assert str(ps.review(plan.timeline, timeline))
    return wrong, timeline


def test_measured_costs_make_a_plan_that_trains_and_is_recorded(
    two_ranks: Processes, accelerator: torch.device, tmp_path: Path
) -> None:
    (wrong, first), (also_wrong, second) = two_ranks.run(
        plan_and_record, accelerator, tmp_path, seconds=120.0
    )
    assert (wrong, also_wrong) == ({}, {})
    # Both ranks have the rows of both.
    assert (first.start == second.start).all()
    assert (first.end == second.end).all()
    compute = first.schedule.rows.is_compute
    assert (first.end[compute] > first.start[compute]).all()
    assert (first.peak_bytes > 0) == (accelerator.type == "cuda")


class Layered(nn.Module):
    """Layers with dropout, by a name that every cut keeps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(EQUAL, EQUAL), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)
        )
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_training(
    device: torch.device, family: str, stages: int, seed: int, group: Any
) -> tuple[ps.Pipeline, torch.optim.Optimizer]:
    pipe = ps.split(Layered(seed), layers="layers", stages=stages).to(device)
    pipeline = ps.Pipeline(
        pipe,
        family,
        microbatches=4,
        loss=mean_loss,
        group=group,
        device=device,
        seed=5,
        ranks=1 if group is None else None,
    )
    return pipeline, torch.optim.Adam(pipeline.parameters(), lr=1e-2)


def train(pipeline: ps.Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> None:
    (device,) = {parameter.device for parameter in pipeline.parameters()}
    for step in steps:
        batch, target = make_batch((8, EQUAL), step, device)
        optimizer.zero_grad()
        pipeline.step(batch, target=target)
        optimizer.step()


def save_and_load(rank: int, device: torch.device, folder: Path) -> dict[str, float]:
    """Save in one layout, go on in another; where that is not a run in one process throughout."""
    del rank
    world = dist.group.WORLD
    pipeline, optimizer = make_training(device, "ZBV", 4, 0, world)
    with closing(pipeline), ps.Checkpoints(folder) as checkpoints:
        train(pipeline, optimizer, range(2))
        checkpoints.save(2, pipeline, optimizer)
    pipeline, optimizer = make_training(device, "1F1B", 2, 7, world)
    with closing(pipeline):
        restored = ps.Checkpoints(folder).load(pipeline, optimizer)
        assert restored is not None
        assert restored.step == 2
        train(pipeline, optimizer, range(2, 4))
    alone, its_optimizer = make_training(device, "GPipe", 1, 0, None)
    train(alone, its_optimizer, range(4))
    expected, found = alone.state_dict(), pipeline.state_dict()
    return differences(found, {name: expected[name] for name in found}, 1e-9)


def test_a_checkpoint_of_one_layout_goes_on_in_another_with_the_same_random_numbers(
    two_ranks: Processes, accelerator: torch.device, tmp_path: Path
) -> None:
    assert two_ranks.run(save_and_load, accelerator, tmp_path, seconds=120.0) == [{}] * 2
