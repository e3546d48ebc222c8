"""A training program as others write them: nothing in it knows of Penstock.

Stages are cut by lists of module names, the schedule is a class found by name or a CSV file,
stages are sharded over two data-parallel ranks, and every step is followed by a validation.

    torchrun --nproc-per-node 4 trainer.py SCHEDULE [CSV]
"""

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor

LAYERS, WIDTH, WORDS, MICROBATCHES, STEPS = 6, 16, 32, 4, 3


class Model(nn.Module):
    """A transformer without attention; what a stage does not have is None or missing."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict(
            {
                str(number): nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
                for number in range(LAYERS)
            }
        )
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embeddings is None else self.embeddings(x)
        for layer in self.layers.values():
            x = x + layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.head is None else self.head(x)


def names_per_stage(stages: int) -> list[list[str]]:
    layers = [f"layers.{number}" for number in range(LAYERS)]
    bounds = [LAYERS * stage // stages for stage in range(stages + 1)]
    parts = [layers[bounds[i] : bounds[i + 1]] for i in range(stages)]
    parts[0].insert(0, "embeddings")
    parts[-1] += ["norm", "head"]
    return parts


def keep(model: Model, names: list[str]) -> Model:
    part = copy.deepcopy(model)
    for name in ("embeddings", "norm", "head"):
        if name not in names:
            setattr(part, name, None)
    for number in list(part.layers):
        if f"layers.{number}" not in names:
            del part.layers[number]
    return part


def main(schedule: str, *csv: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    kind: Any = _PipelineScheduleRuntime if csv else get_schedule_class(schedule)
    per_rank = 2 if issubclass(kind, PipelineScheduleMulti) else 1
    total = 2 * per_rank
    is_v = kind is ScheduleZBVZeroBubble
    own = [rank, total - 1 - rank] if is_v else list(range(rank, total, 2))
    torch.manual_seed(0)
    model, names = Model().double(), names_per_stage(total)
    stages = []
    for index in own:
        part = keep(model, names[index])
        fully_shard(part, mesh=mesh["dp"])
        stages.append(PipelineStage(part, index, total, torch.device("cpu"), group=group))
    runner = kind(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=loss)
    if csv:
        runner._load_csv(csv[0])
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    is_first, is_last = 0 in own, total - 1 in own
    told = []
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(STEPS):
        x, y = torch.randint(0, WORDS, (2, 8, 5), generator=data)
        args, target = ((x,) if is_first else ()), (y if is_last else None)
        losses: list[torch.Tensor] = []
        runner.step(*args, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        runner.eval(*args, target=target, losses=found)
        told += [value.item() for value in (*losses, *found)]
    assert all(isinstance(stage.submod, FSDPModule) for stage in stages)
    norms = [p.full_tensor().norm().item() for p in parameters if isinstance(p, DTensor)]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (told, norms))
    if dist.get_rank() == 0:
        print(json.dumps({"module": PipelineStage.__module__, "ranks": everyone}))  # noqa: T201  # a program
    dist.destroy_process_group()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main(*sys.argv[1:])
