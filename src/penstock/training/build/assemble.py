"""What a pipeline consists of on this process, agreed by all ranks."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from penstock.alive.guard import Guard, NoGuard
from penstock.alive.guard_opening import opening_guard
from penstock.alive.joint_guards import JointGuards
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
from penstock.sim.in_flight import messages_in_flight
from penstock.splitting.pipe import Pipe, require_stages
from penstock.splitting.placed_routes import dataflow_on, place_values
from penstock.splitting.signature import Signature, sign
from penstock.step.overlap.overlaps import Overlaps
from penstock.step.stage import Stage
from penstock.tensors.rerouting import Rerouting
from penstock.training.batch.batch import unwrap
from penstock.training.build.batch_statistics import log_batch_statistics
from penstock.training.build.compiled_stages import refuse_compiled_graphs
from penstock.training.build.device import find_device
from penstock.training.build.membership import groups_of_copies, warn_without_group
from penstock.training.build.rank_facts import RankFacts, model_fact, schedule_fact, version_facts
from penstock.training.build.requirements import (
    require_graphs,
    require_names,
    require_routes,
)
from penstock.training.step_schedules import (
    StepSchedules,
    count_microbatches,
    default_ranks,
    number_of_copies,
    read_schedule,
    receives_for,
)

__all__ = ["BUILDING", "Assembly", "BuildRequest", "LocalPart", "Modules", "assemble"]

# What a rank was doing when it could not get ready.
BUILDING = "build its part of the pipeline"
# Every stage's module in order, or just those of this process by stage.
Modules: TypeAlias = Sequence[nn.Module] | Mapping[int, nn.Module]


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What the user gave to build a pipeline from."""

    stages: Pipe | Modules
    schedule: str | Path | Schedule | Plan
    facts: RankFacts
    microbatches: int | None
    group: dist.ProcessGroup | None
    ranks: int | None
    device: torch.device | str | None

    @property
    def pipe(self) -> Pipe | None:
        """The pipe, if the stages came as one."""
        return self.stages if isinstance(self.stages, Pipe) else None


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What this process builds by itself, and keeps; it has no stage of another rank."""

    microbatches: int
    schedules: StepSchedules
    stages: dict[int, Stage]
    device: torch.device
    checkpointed: tuple[int, ...]
    overlaps: Overlaps

    @property
    def schedule(self) -> Schedule:
        """The schedule of a full training step."""
        return self.schedules.schedule


@dataclass(frozen=True, slots=True)
class Assembly:
    """A process's own part, the modules it was chosen from, and what connects it with other ranks.

    Only the build needs `modules`: whoever keeps them keeps the memory of the whole model.
    """

    part: LocalPart
    modules: Modules
    transport: Transport
    control: Control
    guards: JointGuards
    wait_for_device: Callable[[], None]
    close_channels: Callable[[], None]
    routes: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def guard(self) -> Guard:
        """The guard of what the ranks of this pipeline do together."""
        return self.guards.own


def assemble(
    request: BuildRequest, *, fault_injection: FaultInjection | None, timeouts: Timeouts
) -> Assembly:
    """Build this process's part; fail on every rank if one cannot, or if ranks differ."""
    group = request.group
    if group is None:
        part, modules = _build(request)
        warn_without_group(request.ranks, part.stages.values())
        local = LocalTransport(part.schedule.num_ranks)
        return Assembly(
            part,
            modules,
            _inject(local, fault_injection),
            LocalControl(),
            JointGuards(NoGuard(), timeouts),
            wait_for_device=_nothing,
            close_channels=_nothing,
        )
    with opening_guard(group, groups_of_copies(request.stages), timeouts) as guard:
        return _assemble(request, group, JointGuards(guard, timeouts), fault_injection)


def _assemble(
    request: BuildRequest,
    group: dist.ProcessGroup,
    guards: JointGuards,
    fault_injection: FaultInjection | None,
) -> Assembly:
    """Build and connect this rank, watched by the others."""
    control = GroupControl(group, connections=guards.own.connections)
    with control.together(cannot(BUILDING)):
        require_names(group, fault_injection)
        part, modules = _build(request)
        refuse_compiled_graphs(part.stages, part.device)
        facts, known = _facts(part, request.facts), _model_facts(request.stages, part)
    agree(control, facts)
    agree_where_known(control, known)
    members = _connect(control, group, part, request.facts, fault_injection)
    guards.own.attach(members, part.schedule)
    return Assembly(
        part,
        modules,
        _inject(members, fault_injection),
        control,
        guards,
        wait_for_device=members.wait_for_device,
        close_channels=members.close,
        routes=members.routes,
    )


def _connect(
    control: GroupControl,
    group: dist.ProcessGroup,
    part: LocalPart,
    facts: RankFacts,
    fault_injection: FaultInjection | None,
) -> GroupTransport:
    """Open the channels of this rank; every rank calls this."""
    members = GroupTransport(
        group,
        part.device,
        by_order=fault_injection is not None and fault_injection.by_order,
        control=control,
        uses_peer_memory=facts.options.transport != "nccl",
    )
    lowered = part.schedules.lowered(part.microbatches, is_training=True)
    members.open_channels(messages_in_flight(lowered))
    with control.together(cannot(BUILDING)):
        require_routes(members, facts.options.transport)
    return members


def _nothing() -> None:
    """Wait for nothing and close nothing, because one process has no channels."""


def _build(request: BuildRequest) -> tuple[LocalPart, Modules]:
    """Do all that needs no other rank; return it with the modules that it chose from."""
    require_stages(request.stages)
    require_reduction(request.facts.reduction)
    given = read_schedule(request.schedule)
    count = count_microbatches(given, request.microbatches)
    modules, dataflow = _take_apart(request.stages, given)
    num_stages, num_ranks = _count(modules, given, request)
    pipe = request.pipe
    place = pipe and partial(dataflow_on, pipe.routes, pipe.num_stages, pipe.dataflow)
    schedules = StepSchedules(given, count, num_stages, num_ranks, dataflow, place)
    own = range(num_ranks) if request.group is None else [dist.get_rank(request.group)]
    held = _own_stages(modules, schedules.schedule, own, _reroutings(request, schedules.schedule))
    found = {index: stage.module for index, stage in held.items()}
    device = find_device(request.device, found, request.group)
    require_graphs(request.facts, device)
    schedules.place_receives(receives_for(request.group, device))
    log_batch_statistics(found.values(), count)
    checkpointed = _checkpointed_stages(request.schedule)
    graphs, finds = request.facts.options.cuda_graphs, request.facts.options.find_turning_points
    _set_up(held, schedules.schedule, checkpointed, graphs)
    overlaps = Overlaps(device, takes_turns=not graphs, finds_collectives=finds)
    return LocalPart(count, schedules, held, device, checkpointed, overlaps), modules


def _take_apart(stages: Pipe | Modules, given: str | Schedule) -> tuple[Modules, Dataflow | None]:
    """Return the modules, those of a pipe once per copy of the model, and its own dataflow."""
    if isinstance(stages, Pipe):
        return stages.stages * number_of_copies(given), stages.dataflow
    return stages, None


def _reroutings(request: BuildRequest, schedule: Schedule) -> Mapping[int, Rerouting]:
    """Return, by stage, how values are rerouted if stages of one rank share them."""
    pipe, parts = request.pipe, schedule.dataflow.parts
    placed = None if pipe is None else place_values(pipe.routes, pipe.num_stages, schedule)
    if placed is None or schedule.dataflow != placed.dataflow.with_parts(parts):
        return {}
    return {stage: placed.reroutings[part] for stage, part in enumerate(parts)}


def _count(modules: Modules, given: str | Schedule, request: BuildRequest) -> tuple[int, int]:
    """Return how many stages and ranks the pipeline has in all."""
    num_stages = len(modules)
    if request.group is not None:
        num_ranks = dist.get_world_size(request.group)
        if isinstance(modules, Mapping):
            num_stages *= num_ranks
    else:
        asked = request.ranks
        num_ranks = default_ranks(given, num_stages) if asked is None else asked
    if isinstance(given, Schedule) and isinstance(modules, Mapping):
        num_stages = given.num_stages
    return num_stages, num_ranks


def _checkpointed_stages(schedule: str | Path | Schedule | Plan) -> tuple[int, ...]:
    """Return the stages that a plan runs forward again in their backward."""
    if isinstance(schedule, Plan) and schedule.choices is not None:
        return schedule.choices.checkpointed
    return ()


def _facts(part: LocalPart, facts: RankFacts) -> list[Fact]:
    """Return what must be the same on every rank."""
    return [
        *version_facts(),
        plain_fact("microbatches", part.microbatches),
        schedule_fact(part.schedule),
        plain_fact("checkpointed stages", list(part.checkpointed)),
        *facts.facts(),
    ]


def _model_facts(stages: Pipe | Modules, part: LocalPart) -> list[Fact]:
    """Return what each part of the model holds, as far as this rank has it.

    Of a pipe that is what was split: ranks may shard or cast their own stages afterwards.
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


def _inject(transport: Transport, fault_injection: FaultInjection | None) -> Transport:
    if fault_injection is None:
        return transport
    return FaultInjectingTransport(transport, fault_injection)


def _own_stages(
    modules: Modules,
    schedule: Schedule,
    ranks: Sequence[int],
    reroutings: Mapping[int, Rerouting],
) -> dict[int, Stage]:
    own = sorted(stage for rank in ranks for stage in schedule.placement.stages(rank))
    missing = [s for s in own if isinstance(modules, Mapping) and s not in modules]
    if missing:
        raise SizeError(
            f"rank {ranks[0]} must be given its stages {own} ({schedule.placement.style} "
            f"placement), but {missing} are missing; add them to the mapping"
        )
    return {
        index: Stage(
            index, modules[index], replica_of(modules[index]), rerouting=reroutings.get(index)
        )
        for index in own
    }


def _set_up(
    stages: Mapping[int, Stage],
    schedule: Schedule,
    checkpointed: Collection[int],
    cuda_graphs: bool,
) -> None:
    """Prepare stages for how they are run."""
    for index in set(stages) & set(checkpointed):
        stages[index].checkpoint()
    if schedule.rows.has_kind(Kind.BACKWARD_INPUT):
        _prepare_split([stage for index, stage in stages.items() if index not in checkpointed])
    if cuda_graphs and schedule.rows.has_memory_actions:
        raise ArgumentError(
            "a captured stage keeps its memory, so it cannot be recomputed or offloaded; leave "
            "cuda_graphs out, or RECOMPUTE, OFFLOAD and RELOAD"
        )
    for stage in stages.values() if cuda_graphs else ():
        stage.capture_graphs()


def _prepare_split(stages: Iterable[Stage]) -> None:
    """Let stages defer weight gradients; warn once about stages that have none to defer."""
    whole = [
        stage.index
        for stage in stages
        if not stage.prepare_split() and any(p.requires_grad for p in stage.module.parameters())
    ]
    if whole:
        warnings.warn(
            f"the backward of the stages {whole} cannot be split, since none of their trained "
            "weights is used in a product that could be deferred: I does all of it and W nothing, "
            "which is correct, but no faster than a schedule without I and W",
            stacklevel=7,
        )
