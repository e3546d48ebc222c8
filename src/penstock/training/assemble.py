"""Who runs what: the schedule, this process's stages and its transport, agreed by all ranks."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from penstock.alive.guard import Guard, NoGuard
from penstock.alive.guard_opening import open_guard
from penstock.alive.timeouts import Timeouts
from penstock.errors import ArgumentError, SizeError
from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.loss.reduction import require_reduction
from penstock.parallel.replica import replica_of
from penstock.planner.plans import Plan
from penstock.ranks.agreement import Fact, agree, agree_where_known, plain_fact
from penstock.ranks.control import Control, GroupControl, LocalControl, cannot
from penstock.ranks.fault_injection import FaultInjectingTransport, FaultInjection
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import LocalTransport, Transport
from penstock.splitting.pipe import Pipe
from penstock.splitting.signature import Signature, sign
from penstock.step.stage import Stage
from penstock.training.batch.batch import unwrap
from penstock.training.device import find_device
from penstock.training.membership import warn_without_group
from penstock.training.rank_facts import RankFacts, model_fact, schedule_fact, version_facts
from penstock.training.step_schedules import (
    ScheduleSource,
    count_microbatches,
    default_ranks,
    number_of_copies,
)

__all__ = ["BUILDING", "Assembly", "Modules", "gather_crew"]

# What a rank was doing when it could not get ready.
BUILDING = "build its part of the pipeline"
# Every stage's module in order, or just those of this process by stage.
Modules: TypeAlias = Sequence[nn.Module] | Mapping[int, nn.Module]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a pipeline is made of on this process.

    `modules` are those of all stages, or those that this process was given.
    """

    modules: Modules
    microbatches: int
    source: ScheduleSource
    schedule: Schedule
    transport: Transport
    control: Control
    stages: dict[int, Stage]
    device: torch.device
    guard: Guard


@dataclass(frozen=True, slots=True)
class _Part:
    """What this process builds by itself."""

    modules: Modules
    microbatches: int
    source: ScheduleSource
    schedule: Schedule
    stages: dict[int, Stage]
    device: torch.device
    checkpointed: tuple[int, ...]


def gather_crew(
    stages: Pipe | Modules,
    schedule: str | Schedule | Plan,
    terms: RankFacts,
    *,
    microbatches: int | None,
    group: dist.ProcessGroup | None,
    ranks: int | None,
    device: torch.device | str | None,
    fault_injection: FaultInjection | None,
    timeouts: Timeouts,
) -> Assembly:
    """Find out what this process runs, and stop on every rank if one cannot or if they differ."""
    if group is None:
        part = _build(stages, schedule, terms, microbatches, None, ranks, device)
        warn_without_group(ranks, part.stages.values())
        transport = _with_faults(LocalTransport(part.schedule.num_ranks), fault_injection)
        return _crew(part, transport, LocalControl(), NoGuard())
    control = GroupControl(group)
    with control.together(cannot(BUILDING)):
        _require_names(group, fault_injection)
        part = _build(stages, schedule, terms, microbatches, group, ranks, device)
        facts, known = _facts(part, terms), _model_facts(stages, part)
    agree(control, facts)
    agree_where_known(control, known)
    by_order = fault_injection is not None and fault_injection.by_order
    members = GroupTransport(group, part.device, by_order=by_order, control=control)
    members.open_channels(_pairs(part.schedule))
    guard = open_guard(members, part.schedule, timeouts)
    return _crew(part, _with_faults(members, fault_injection), control, guard)


def _crew(part: _Part, transport: Transport, control: Control, guard: Guard) -> Assembly:
    return Assembly(
        part.modules,
        part.microbatches,
        part.source,
        part.schedule,
        transport,
        control,
        part.stages,
        part.device,
        guard,
    )


def _build(
    stages: Pipe | Modules,
    schedule: str | Schedule | Plan,
    terms: RankFacts,
    microbatches: int | None,
    group: dist.ProcessGroup | None,
    ranks: int | None,
    device: torch.device | str | None,
) -> _Part:
    """All that can be done without the other ranks."""
    require_reduction(terms.reduction)
    order = schedule.schedule if isinstance(schedule, Plan) else schedule
    count = count_microbatches(order, microbatches)
    modules, dataflow = _take_apart(stages, order)
    source = _find_source(modules, order, dataflow, group, ranks)
    found = source.training(count)
    own = range(found.num_ranks) if group is None else [dist.get_rank(group)]
    held = _own_stages(modules, found, own)
    home = find_device(device, {index: stage.module for index, stage in held.items()}, group)
    _require_graphs(terms, home)
    checkpointed = _checkpointed_stages(schedule)
    _set_up(held, found, checkpointed, terms.cuda_graphs)
    return _Part(modules, count, source, found, held, home, checkpointed)


def _take_apart(
    stages: Pipe | Modules, schedule: str | Schedule
) -> tuple[Modules, Dataflow | None]:
    """The modules, those of a pipe once per copy of the model, and the model's own dataflow."""
    if isinstance(stages, Pipe):
        return stages.stages * number_of_copies(schedule), stages.dataflow
    return stages, None


def _checkpointed_stages(schedule: str | Schedule | Plan) -> tuple[int, ...]:
    """The stages that a plan wants to run their forward again."""
    if isinstance(schedule, Plan) and schedule.choices is not None:
        return schedule.choices.checkpointed
    return ()


def _require_graphs(terms: RankFacts, device: torch.device) -> None:
    if terms.cuda_graphs and device.type != "cuda":
        raise ArgumentError(
            f"cuda_graphs asks for a CUDA device (device: {device}); leave it out, or move "
            "the stages there"
        )
    if terms.cuda_graphs and terms.seed is not None:
        raise ArgumentError(
            f"a seed (here {terms.seed}) is set layer by layer, which a CUDA graph cannot repeat; "
            "leave out cuda_graphs or seed"
        )


def _require_names(group: dist.ProcessGroup, fault_injection: FaultInjection | None) -> None:
    if fault_injection is not None and dist.get_backend(group) != "gloo":
        raise ArgumentError(
            "fault_injection must be used with gloo, or with ranks that share a process, where "
            f"messages have names (got backend {dist.get_backend(group)}); leave it out"
        )


def _facts(part: _Part, terms: RankFacts) -> list[Fact]:
    """What every rank knows."""
    return [
        *version_facts(),
        plain_fact("microbatches", part.microbatches),
        schedule_fact(part.schedule),
        plain_fact("checkpointed stages", list(part.checkpointed)),
        *terms.facts(),
    ]


def _model_facts(stages: Pipe | Modules, part: _Part) -> list[Fact]:
    """What each part of the model holds, where this rank has it.

    A pipe tells what was split: what is done to stages afterwards, say to shard or cast them, is
    done by each rank to its own.
    """
    flow = part.schedule.dataflow
    split: list[Signature | None] = [None] * flow.num_parts
    given: list[Signature | None] = [None] * flow.num_parts
    if isinstance(stages, Pipe):
        split[: len(stages.signatures)] = stages.signatures
    else:
        for stage, number in enumerate(flow.parts):
            if given[number] is None and (not isinstance(stages, Mapping) or stage in stages):
                given[number] = sign(unwrap(stages[stage]))
    return [model_fact(i, one) for known in (split, given) for i, one in enumerate(known)]


def _with_faults(transport: Transport, fault_injection: FaultInjection | None) -> Transport:
    return (
        transport
        if fault_injection is None
        else FaultInjectingTransport(transport, fault_injection)
    )


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
            stacklevel=6,
        )


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """The ranks that talk to one another, in both directions."""
    holder = schedule.placement.rank_of_stage
    pairs = {(holder[a], holder[b]) for a, b in schedule.dataflow.edges if holder[a] != holder[b]}
    return sorted(pairs | {(b, a) for a, b in pairs})
