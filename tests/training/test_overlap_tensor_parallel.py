"""Overlapped pairs of stages that are tensor-parallel: two pipeline ranks times two of these."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import penstock as ps
from tests.models import differences
from tests.processes import Processes

WIDTH, MICROBATCHES = 8, 6


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def compute(self, value: torch.Tensor) -> torch.Tensor:
        """Return what is added."""
        added: torch.Tensor = self.back(torch.tanh(self.wide(self.norm(value))))
        return added

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            added: torch.Tensor = checkpoint(self.compute, value, use_reentrant=False)
            return value + added
        return value + self.compute(value)


def run_tensor_parallel(_: int, schedule: ps.Schedule, is_checkpointed: bool) -> dict[str, Any]:
    """Train tensor-parallel stages on two times two processes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inside", "pipeline"))
    return train_tensor_parallel(mesh, schedule, is_checkpointed=is_checkpointed)


def train_tensor_parallel(
    mesh: DeviceMesh, schedule: ps.Schedule, *, is_checkpointed: bool
) -> dict[str, Any]:
    """Train two steps; return where gradients are wrong and what the pipeline says of itself."""
    device = torch.device(mesh.device_type)
    torch.manual_seed(1)
    whole = nn.Sequential(
        *(Block(is_checkpointed).double() for _ in range(schedule.dataflow.num_parts))
    ).to(device)
    batch, target = torch.randn(2, 2 * MICROBATCHES, WIDTH, dtype=torch.float64).to(device)
    stages = {
        stage: deepcopy(whole[schedule.dataflow.parts[stage]])
        for stage in schedule.placement.stages(mesh["pipeline"].get_local_rank())
    }
    plan = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
    for module in stages.values():
        parallelize_module(module, mesh["inside"], plan)
    torch.autograd.backward(nn.functional.mse_loss(whole(batch), target))
    with ps.Pipeline(
        stages,
        schedule,
        microbatches=MICROBATCHES,
        loss=nn.functional.mse_loss,
        group=mesh["pipeline"],
        device=device,
    ) as pipeline:
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(batch, target=target)
        text = repr(pipeline)
    wrong: dict[str, float] = {}
    for stage, module in stages.items():
        found = {name: _whole(p.grad) for name, p in module.named_parameters()}
        part = whole[schedule.dataflow.parts[stage]]
        wanted = {name: _whole(p.grad) for name, p in part.named_parameters()}
        wrong |= {f"{stage}.{name}": by for name, by in differences(found, wanted).items()}
    return {"wrong": wrong, "repr": text}


def _whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("family", ["DualPipeV", "ZBV"])
def test_tensor_parallel_stages_are_exact(
    four_processes: Processes, family: str, is_checkpointed: bool
) -> None:
    schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    everyone = four_processes.run(run_tensor_parallel, schedule, is_checkpointed, seconds=120)
    assert [found["wrong"] for found in everyone] == [{}] * 4
    by_turns = family == "DualPipeV"
    assert ["overlapped actions by turns" in found["repr"] for found in everyone] == [by_turns] * 4
