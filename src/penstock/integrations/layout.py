"""How the processes of a run are arranged: pipelines of some ranks, and replicas of them.

8 processes, ranks=4      replica 0: processes 0 1 2 3      replica 1: processes 4 5 6 7
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from penstock.assembly import build
from penstock.errors import ArgumentError
from penstock.ir.schedule import Schedule
from penstock.loss.reduction import Reduction
from penstock.splitting.output_loss import find_loss
from penstock.splitting.pipe import Pipe
from penstock.splitting.splitter import split
from penstock.step.step_data import LossFunction
from penstock.training.pipeline import Pipeline

__all__ = ["Layout", "PipelineConfig", "build_pipeline", "find_layout"]


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What a pipeline is made of: the schedule, its microbatches per batch, and the split.

    `ranks` is how many processes one pipeline has, all of them if it is None; more processes are
    replicas. `layers` and `example`, the model's keyword arguments, are those of `split`.
    """

    schedule: str = "1F1B"
    microbatches: int = 4
    ranks: int | None = None
    layers: str | Sequence[str] = "auto"
    example: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of this process: in which replica, and among how many."""

    ranks: int
    replicas: int
    replica: int
    mesh: DeviceMesh | None

    @property
    def rank(self) -> int:
        """The rank of this process in its pipeline."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("pipeline")


def find_layout(config: PipelineConfig, device: torch.device) -> Layout:
    """Arrange all processes; a single one runs all ranks of one pipeline."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = config.ranks or world
    if world == 1:
        return Layout(ranks, 1, 0, None)
    if world % ranks:
        raise ArgumentError(
            f"the number of processes must be a multiple of the ranks of a pipeline (got {world} "
            f"processes and {ranks} ranks); change ranks or start other processes"
        )
    mesh = init_device_mesh(
        device.type, (world // ranks, ranks), mesh_dim_names=("replica", "pipeline")
    )
    return Layout(ranks, world // ranks, dist.get_rank() // ranks, mesh)


def build_pipeline(
    model: nn.Module,
    config: PipelineConfig,
    layout: Layout,
    device: torch.device,
    reduction: Reduction,
    seed: int,
    *,
    loss: LossFunction = find_loss,
) -> Pipeline:
    """Split a model, and move, wrap and train the stages of this process."""
    schedule = build(config.schedule, ranks=layout.ranks, microbatches=config.microbatches)
    pipe = split(
        model,
        stages=schedule.num_stages,
        layers=config.layers,
        example_kwargs=config.example,
    )
    if layout.mesh is None:
        _move(pipe, range(pipe.num_stages), device)
        group = None
    else:
        pipe = _place(pipe, schedule, layout.mesh, device)
        group = layout.mesh["pipeline"]
    return Pipeline(
        pipe, schedule, loss=loss, reduction=reduction, group=group, device=device, seed=seed
    )


def _place(pipe: Pipe, schedule: Schedule, mesh: DeviceMesh, device: torch.device) -> Pipe:
    """Move the stages of this process to its device, and wrap them if there are replicas."""
    own = schedule.placement.stages(mesh.get_local_rank("pipeline"))
    _move(pipe, own, device)
    stages = {index: pipe.stages[index] for index in own}
    if mesh.size(0) == 1:
        return pipe
    replicas = mesh.get_group("replica")
    is_trained = {
        index: any(parameter.requires_grad for parameter in stage.parameters())
        for index, stage in stages.items()
    }
    return pipe.with_stages(
        {
            index: DistributedDataParallel(stage, process_group=replicas)
            for index, stage in stages.items()
            if is_trained[index]
        }
    )


def _move(pipe: Pipe, stages: Iterable[int], device: torch.device) -> None:
    """Move some stages; those of a model without memory get some, to be loaded into."""
    own = list(stages)
    if any(p.is_meta for index in own for p in pipe.stages[index].parameters()):
        pipe.materialize(own, device, lambda _module: None)
    else:
        for index in own:
            pipe.stages[index].to(device)
