"""Who runs what: the schedule, this process's stages and its transport, agreed by all ranks."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import ArgumentError, PenstockError, PipelineError, SizeError
from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.runtime.group_transport import GroupTransport
from penstock.runtime.replica import replica_of
from penstock.runtime.stage import Stage
from penstock.runtime.transport import LocalTransport, Transport
from penstock.training.agreement import agree, gather_values
from penstock.training.programs import ScheduleSource, default_ranks

__all__ = ["Crew", "Modules", "gather_crew"]

# Every stage's module in order, or just those of this process by stage.
Modules: TypeAlias = Sequence[nn.Module] | Mapping[int, nn.Module]


@dataclass(frozen=True, slots=True)
class Crew:
    """What a pipeline is made of on this process."""

    source: ScheduleSource
    schedule: Schedule
    transport: Transport
    stages: dict[int, Stage]


def gather_crew(
    modules: Modules,
    schedule: str | Schedule,
    *,
    dataflow: Dataflow | None,
    microbatches: int,
    has_loss: bool,
    group: dist.ProcessGroup | None,
    ranks: int | None,
    device: torch.device,
    checkpointed: Collection[int],
    cuda_graphs: bool,
) -> Crew:
    """Find out what this process runs, and stop on every rank if one cannot or if they differ."""
    if cuda_graphs and device.type != "cuda":
        raise ArgumentError(
            f"cuda_graphs asks for a CUDA device (device: {device}); leave it out, or set device"
        )
    if group is None:
        source = _find_source(modules, schedule, dataflow, None, ranks)
        found = source.training(microbatches)
        transport: Transport = LocalTransport(found.num_ranks)
        stages = _own_stages(modules, found, transport.ranks)
        _set_up(stages, found, checkpointed, cuda_graphs)
        return Crew(source, found, transport, stages)
    members = GroupTransport(group, device)
    try:
        source = _find_source(modules, schedule, dataflow, group, ranks)
        found = source.training(microbatches)
        stages = _own_stages(modules, found, members.ranks)
        _set_up(stages, found, checkpointed, cuda_graphs)
    except PenstockError as error:
        _raise_first(members, error)
        raise
    _raise_first(members, None)
    agree(
        members,
        {
            "schedule": source.digest(microbatches),
            "loss": "given" if has_loss else "none",
        },
    )
    members.open_channels(_pairs(found))
    return Crew(source, found, members, stages)


def _raise_first(transport: Transport, error: PenstockError | None) -> None:
    """If a rank cannot build its part, raise that on the ranks that could."""
    told = gather_values(transport, None if error is None else str(error))
    failed = {rank: message for rank, message in enumerate(told) if message is not None}
    if failed and error is None:
        rank, message = next(iter(failed.items()))
        raise PipelineError(f"rank {rank} cannot build its part of the pipeline: {message}")


def _find_source(
    modules: Modules,
    schedule: str | Schedule,
    dataflow: Dataflow | None,
    group: dist.ProcessGroup | None,
    ranks: int | None,
) -> ScheduleSource:
    """How many stages and ranks there are in all."""
    num_stages = len(modules)
    if group is not None:
        num_ranks = dist.get_world_size(group)
        if isinstance(modules, Mapping):
            num_stages *= num_ranks
    else:
        num_ranks = default_ranks(schedule, num_stages) if ranks is None else ranks
    if isinstance(schedule, Schedule) and isinstance(modules, Mapping):
        num_stages = schedule.num_stages
    return ScheduleSource(schedule, num_stages, num_ranks, dataflow)


def _own_stages(modules: Modules, schedule: Schedule, ranks: Sequence[int]) -> dict[int, Stage]:
    own = sorted(stage for rank in ranks for stage in schedule.placement.stages(rank))
    missing = [s for s in own if isinstance(modules, Mapping) and s not in modules]
    if missing:
        raise SizeError(
            f"rank {ranks[0]} holds the stages {own} ({schedule.placement.style} placement), but "
            f"was not given {missing}"
        )
    return {index: Stage(index, modules[index], replica_of(modules[index])) for index in own}


def _set_up(
    stages: Mapping[int, Stage],
    schedule: Schedule,
    checkpointed: Collection[int],
    cuda_graphs: bool,
) -> None:
    """Tell stages how they are run."""
    for index in set(stages) & set(checkpointed):
        stages[index].checkpoint()
    if schedule.rows.has_kind(Kind.BACKWARD_INPUT):
        _prepare_split([stage for index, stage in stages.items() if index not in checkpointed])
    for stage in stages.values() if cuda_graphs else ():
        stage.capture_graphs()


def _prepare_split(stages: Iterable[Stage]) -> None:
    """Let stages put off weight work; tell the user once where there is none to put off."""
    whole = [
        stage.index
        for stage in stages
        if not stage.prepare_split() and any(p.requires_grad for p in stage.module.parameters())
    ]
    if whole:
        warnings.warn(
            f"the backward of the stages {whole} cannot be split, since none of their trained "
            "weights goes into a product that could be left for later: I does all of it and W "
            "nothing, which is right, but no faster than a schedule without I and W",
            stacklevel=5,
        )


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """The ranks that talk to one another, in both directions."""
    holder = schedule.placement.rank_of_stage
    pairs = {(holder[a], holder[b]) for a, b in schedule.dataflow.edges if holder[a] != holder[b]}
    return sorted(pairs | {(b, a) for a, b in pairs})
