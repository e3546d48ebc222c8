"""The user's object: stages and a schedule in, training steps out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from penstock.alive.progress_log import AGREEMENT, FLUSH, OUTCOME
from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts
from penstock.errors import PipelineError
from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.loss.reduction import Reduction
from penstock.planner.plans import Plan
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.control import cannot
from penstock.ranks.fault_injection import FaultInjection
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.sim.timeline import Timeline
from penstock.splitting.pipe import Pipe
from penstock.step.clocks import clock_for
from penstock.step.executor import (
    Around,
    Executor,
    LossFunction,
    Microbatches,
    Results,
    StepRecording,
    order_for_one_process,
)
from penstock.step.microbatches import find_dims, merge_outputs
from penstock.training.assemble import BUILDING, Modules, gather_crew
from penstock.training.batch.agreement import Agreed, BatchAgreement
from penstock.training.batch.batch import accepted_keywords, unwrap
from penstock.training.batch.request import StepRequest
from penstock.training.clip import clip_gradients, total_norm
from penstock.training.loss_function import takes_target, with_target
from penstock.training.membership import find_group
from penstock.training.outcome import gather_outcome, raise_first_fault
from penstock.training.rank_facts import RankFacts
from penstock.training.recorded_step import join_recordings
from penstock.training.scaler import unscale
from penstock.training.seeding import seed_stages
from penstock.training.ties import (
    Ties,
    connect_holders,
    declared_ties,
    find_ties,
    merge_names,
    names_of_shared,
    ties_of,
)
from penstock.training.weighing import Weighing
from penstock.training.whole_state import copy_state, gather_state, guard_original

__all__ = ["Pipeline", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave back. The loss is that of the whole batch, and known on every rank.

    Outputs are there on ranks that hold a last stage, if asked for; the timeline is there if the
    step was recorded.
    """

    loss: float | None
    outputs: Any = None
    timeline: Timeline | None = None


class Pipeline:
    """Trains the stages of a model in the order of a schedule.

    `stages` is a `Pipe`, the modules of all stages in order, of which this process keeps its own,
    or a mapping from stage to module with just those. `schedule` is the name of a family, a
    `Schedule` or a `Plan`; the last two bring their number of `microbatches`. With `group` (a
    process group, or one dimension of a device mesh) every process is one rank; without it, this
    process runs all `ranks`. The stages run where their parameters are; `device` is needed only
    where these do not say it.

    >>> stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    >>> pipeline = Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss())
    >>> pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4)).loss > 0
    True

    `loss(output, target)` gives the loss of a microbatch, or `loss(output)` where the model makes
    its own. `reduction` says how these make up that of the batch: "auto" finds out what the
    unsplit model computes on it, "mean" is a mean over rows, "sum" a sum, and a function a mean
    over what it counts in the target, or in the `labels`, of one microbatch.
    `around` maps a kind of action to a function that is called in its place, with the action and
    with what it would do. `merge` puts the microbatches' outputs together, one tensor of each at
    a time; without it they are joined along dimension 0. `ties` names parameters that are one and
    the same on several ranks, where identity cannot tell; see `penstock.training.ties`. With
    `cuda_graphs` stages run as CUDA graphs from the second step on, as long as shapes stay.
    With `seed`, random numbers inside stages depend on seed, step, layer and microbatch alone, so
    that dropout is the same for every layout and when run again in the backward.
    In the first steps, and whenever the form of the batch is new, ranks compare a sample of what
    they were given for the same argument, and refuse the step if it differs; `compare_data=False`
    leaves that out.
    `timeouts` says how long to wait for a rank that does not answer before it is given up.
    `fault_injection` is for tests: it slows down, reorders or cuts off what goes between ranks.
    """

    def __init__(
        self,
        stages: Pipe | Modules,
        schedule: str | Schedule | Plan,
        *,
        microbatches: int | None = None,
        loss: LossFunction | None = None,
        reduction: Reduction = "auto",
        group: dist.ProcessGroup | DeviceMesh | None = None,
        ranks: int | None = None,
        device: torch.device | str | None = None,
        around: Mapping[Kind, Around] | None = None,
        merge: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
        ties: Sequence[Sequence[str]] = (),
        cuda_graphs: bool = False,
        seed: int | None = None,
        compare_data: bool = True,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        fault_injection: FaultInjection | None = None,
    ) -> None:
        self._loss = None if loss is None else with_target(loss)
        self._needs_target = loss is None or takes_target(loss)
        self._weighing = Weighing(reduction, makes_own=not self._needs_target, merge=merge)
        self._around = dict(around or {})
        self._merge = merge
        process_group = find_group(group)
        pipe = stages if isinstance(stages, Pipe) else None
        crew = gather_crew(
            stages,
            schedule,
            RankFacts(loss is not None, reduction, ties, cuda_graphs, seed, compare_data),
            microbatches=microbatches,
            group=process_group,
            ranks=ranks,
            device=device,
            fault_injection=fault_injection,
            timeouts=timeouts,
        )
        modules, self._microbatches = crew.modules, crew.microbatches
        self._source, self._schedule = crew.source, crew.schedule
        self._transport, self._stages = crew.transport, crew.stages
        self._control = crew.control
        self._device = crew.device
        self._guard = crew.guard
        self._accepted = {i: accepted_keywords(s.module) for i, s in self._stages.items()}
        self._agreement = BatchAgreement(
            self._control,
            self._schedule,
            self._accepted.values(),
            compares_data=compare_data,
        )
        self._has_own_names = pipe is not None
        self._parameters = tuple(self.parameters())
        tied = ties if pipe is None else [*ties, *ties_of(pipe)]
        with self._guard.call(), self._guard.tracking():
            self._ties = self._keep_ties(modules, tied, process_group)
        self._shared_names = merge_names(names_of_shared(pipe, modules, ties))
        self._programs: dict[tuple[int, bool], tuple[Schedule, Executor]] = {}
        parts = self._schedule.dataflow.parts
        self._random = (
            None if seed is None else seed_stages(seed, self._stages, parts, self._device)
        )
        self._random_step = 0
        # Those that a step which fails leaves as they were before it.
        self._without_gradients: list[nn.Parameter] = []
        self._group = process_group
        if pipe is not None:
            guard_original(pipe, self, {parts[stage] for stage in self._stages})

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        record: bool = False,
        gradient_scale: float = 1.0,
        **kwargs: Any,
    ) -> StepResult:
        """Run one batch forward and backward; gradients are added to what `.grad` holds.

        Positional arguments go to the first stage, keywords to every stage that takes them, the
        target to the loss; ranks that hold no such stage may leave them out. `gradient_scale`
        multiplies the loss in the backward only, for a gradient scaler.
        """
        if self._loss is None:
            raise PipelineError("a training step needs a loss; give Pipeline(loss=...)")
        if self._schedule.is_forward_only:
            raise PipelineError(
                f"{self._schedule.name} has no backwards to train with; "
                "use eval, or another schedule"
            )
        count = self._microbatches
        request = StepRequest(
            True, count, args, kwargs, target, return_outputs, record, gradient_scale
        )
        return self._run(request)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = True,
        record: bool = False,
        microbatches: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run one batch forward only, without a graph; the loss is given if there is a target."""
        count = self._microbatches if microbatches is None else microbatches
        return self._run(
            StepRequest(False, count, args, kwargs, target, return_outputs, record, 1.0)
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule of a full training step, without communication unless it was given so."""
        return self._schedule

    @property
    def device(self) -> torch.device:
        """The device that this process's stages run on; values from other ranks arrive there."""
        return self._device

    def __repr__(self) -> str:
        held, ranks = list(self._stages), list(self._transport.ranks)
        left = sum(map(len, self.undeferred_weights.values())) if self._random_step else 0
        return (
            f"<Pipeline {self._schedule.name}, {self._microbatches} microbatches: stages {held} "
            f"of {self._schedule.num_stages} as ranks {ranks} of {self._schedule.num_ranks} on "
            f"{self._device}{f', {left} weights finished in I' if left else ''}>"
        )

    @property
    def undeferred_weights(self) -> dict[int, list[str]]:
        """The weights of each stage here whose gradients I has finished so far, leaving W nothing.

        In a schedule that splits the backward, these are weights with hooks, in checkpointed
        blocks, or used otherwise than in a product. They are right, but W is shorter for it.
        """
        found = {index: stage.undeferred_weights() for index, stage in self._stages.items()}
        return {index: names for index, names in found.items() if names}

    @property
    def random_step(self) -> int:
        """How many training steps have ended well: the step that random numbers are drawn for.

        It is all that `seed` needs to go on where a run was left: a checkpoint saves this number,
        and sets it on every rank before the next step.
        """
        return self._random_step

    @random_step.setter
    def random_step(self, step: int) -> None:
        self._random_step = step

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The modules of the stages that this process runs."""
        return {index: stage.module for index, stage in self._stages.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, once each.

        Names are the model's own if it came as a `Pipe`, else as in `nn.Sequential` of all stages.
        """
        seen: set[nn.Parameter] = set()
        for stage, name, parameter in self._held_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield (name if self._has_own_names else f"{stage}.{name}"), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, once each, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """This process's parameters and buffers, named as by `named_parameters`."""
        return {
            name if self._has_own_names else f"{stage}.{name}": value
            for stage, module in self.modules.items()
            for name, value in unwrap(module).state_dict().items()
        }

    def full_state_dict(self) -> dict[str, Any]:
        """The whole model's parameters and buffers, copied to the first rank's host memory.

        Every rank calls it, those of every replica too, and all but the first get nothing. Names
        are those of `state_dict`; those of one parameter have one tensor.
        """
        own = self.state_dict()
        if self._group is None:
            return copy_state(own, self._shared_names)
        connections = Connections()
        with self._guard.call(connections.abort), self._guard.tracking():
            return gather_state(own, self._shared_names, self._control, self._group, connections)

    @property
    def shared_names(self) -> dict[str, str]:
        """Further names of parameters that have several, on any rank, and the first of each."""
        return dict(self._shared_names)

    def _held_parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Stage, name in the stage and parameter, once per name."""
        for stage, module in self.modules.items():
            for name, parameter in unwrap(module).named_parameters(remove_duplicate=False):
                yield stage, name, parameter

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradients by the norm of the whole model's, and return that norm.

        Every rank calls it, after its steps and before its optimizer, and gets the same norm.
        """
        elsewhere = frozenset() if self._ties is None else self._ties.counted_elsewhere
        own = list(self.parameters())
        with self._guard.call():
            norm = total_norm(own, norm_type, self._control, counted_elsewhere=elsewhere)
        clip_gradients(own, max_norm, norm)
        return norm

    def unscale_(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients like `scaler.unscale_`, but agree with all ranks what was found.

        For steps with `gradient_scale=scaler.get_scale()`. Every rank calls it before
        `scaler.step(optimizer)` and `scaler.update()`, which then do the same on every rank.
        """
        with self._guard.call():
            unscale(scaler, optimizer, self._control)

    def guarded(self, abort: Callable[[], None]) -> AbstractContextManager[None]:
        """Something else that all ranks do at the same time, such as saving a checkpoint.

        If a rank is lost meanwhile, another thread calls `abort`, which is to end whatever the
        inside waits for; all ranks then raise the same `PeerLostError`.
        """
        return self._guard.call(abort)

    def _run(self, request: StepRequest) -> StepResult:
        with self._guard.call():
            try:
                return self._run_together(request)
            except LinkLostError:
                self._abandon_step()
                raise

    def _run_together(self, request: StepRequest) -> StepResult:
        log = self._guard.log
        log.begin_step()
        log.start(AGREEMENT)
        agreed, signature = self._agree(request)
        lowered, program = self._program(len(agreed.rows.rows), request.is_training)
        results, recording, merged, failure = Results(), None, None, None
        self._begin_step(signature, request.is_training)
        log.end()
        try:
            batch = self._split(request, agreed, program)
            recording = self._execute(program, batch, results, request.is_recorded)
            self._check_weights(batch)
            merged = self._merge_outputs(results)
        except StepFailedError as error:
            failure = error
        log.start(FLUSH)
        self._transport.end_step()
        log.end()
        log.start(OUTCOME)
        outcome = gather_outcome(self._control, results, failure)
        if outcome.has_failed:
            self._abandon_step()
            raise_first_fault(self._control, failure)
        self._transport.remember_shapes()
        if request.is_training and self._ties is not None:
            self._ties.end_step()
        log.end()
        self._random_step += request.is_training
        timeline = None
        if recording is not None:
            timeline = join_recordings(self._control, lowered, recording)
        return StepResult(outcome.loss, merged, timeline)

    def _begin_step(self, signature: bytes, is_training: bool) -> None:
        self._transport.begin_step(signature)
        if self._random is not None:
            self._random.begin_step(self._random_step)
        if is_training:
            self._without_gradients = [p for p in self._parameters if p.grad is None]
            # Ties first: they put away what the gradients held, which copies of a stage do too.
            if self._ties is not None:
                self._ties.begin_step()
            for stage in self._stages.values():
                stage.replica.begin_step()

    def _abandon_step(self) -> None:
        for stage in self._stages.values():
            stage.clear()
        if self._ties is not None:
            self._ties.abandon_step()
        for parameter in self._without_gradients:
            parameter.grad = None
        self._transport.forget_shapes()

    def _execute(
        self, program: Executor, batch: Microbatches, results: Results, is_recorded: bool
    ) -> StepRecording | None:
        if is_recorded:
            return program.record(batch, results, clock_for(self._device))
        if torch._C._autograd._profiler_enabled():
            program.profile(batch, results)
        else:
            program.run(batch, results)
        return None

    def _agree(self, request: StepRequest) -> tuple[Agreed, bytes]:
        """What all ranks know of the batch, and a name for it."""
        uses_target = self._needs_target or self._weighing.counts_target
        facts = request.describe(needs_target=self._needs_target, uses_target=uses_target)
        if self._ties is not None:
            facts = replace(facts, trained_ties=self._ties.are_trained())
        replaced = None if self._ties is None else self._ties.find_replaced()
        if replaced is not None:
            error = (
                f"{replaced!r} is shared with another rank and was replaced by another parameter "
                "after the pipeline was built; build the pipeline again, or change its values"
            )
            facts = replace(facts, error=error)
        return self._agreement.agree(
            facts,
            request.values,
            request.named,
            mode=self._mode(),
            is_recorded=request.is_recorded,
        )

    def _mode(self) -> tuple[bytes, torch.dtype | None]:
        """What the user may change between steps, and what goes between stages depends on."""
        kind = self._device.type
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return bytes(parameter.requires_grad for parameter in self._parameters), cast_to

    def _split(self, request: StepRequest, agreed: Agreed, program: Executor) -> Microbatches:
        """This rank's microbatches; a batch that cannot be split fails the step on every rank."""
        try:
            labels = request.split_labels(len(agreed.rows.rows)) if agreed.lacks_labels else None
            told = self._weighing.ask_for_counts(self._control, agreed, labels)
            weigh = partial(
                self._weighing.make,
                agreed,
                told=told,
                is_training=request.is_training,
                dims=find_dims(request.target) or find_dims(request.values) or [0],
            )
            return request.split(agreed, self._accepted, weigh, self._needs_target)
        except LinkLostError:
            raise
        except Exception as error:
            program.abandon()
            raise StepFailedError(f"rank {self._transport.ranks[0]}", error) from error

    def _merge_outputs(self, results: Results) -> Any:
        """This rank's outputs as one; where they do not fit, the step fails on every rank."""
        outputs = [results.outputs[number] for number in sorted(results.outputs)]
        try:
            return merge_outputs(outputs, self._merge) if outputs else None
        except Exception as error:
            raise StepFailedError(f"rank {self._transport.ranks[0]}", error) from error

    def _check_weights(self, batch: Microbatches) -> None:
        """Fail the step on every rank if a loss was weighed wrongly."""
        try:
            batch.weigher.check()
        except Exception as error:
            raise StepFailedError(f"rank {self._transport.ranks[0]}", error) from error

    def _program(self, count: int, is_training: bool) -> tuple[Schedule, Executor]:
        if (count, is_training) not in self._programs:
            lowered = self._source.lowered(count, is_training=is_training)
            rows: Sequence[int]
            if len(self._transport.ranks) == self._transport.num_ranks:
                rows = order_for_one_process(lowered)
            else:
                (rank,) = self._transport.ranks
                rows = range(int(lowered.rows.first[rank]), int(lowered.rows.first[rank + 1]))
            executor = Executor(
                lowered,
                rows,
                self._stages,
                self._transport,
                loss=self._loss,
                around=self._around,
                log=self._guard.log,
            )
            self._programs[count, is_training] = lowered, executor
        return self._programs[count, is_training]

    def _keep_ties(
        self, stages: Modules, names: Sequence[Sequence[str]], group: dist.ProcessGroup | None
    ) -> Ties | None:
        """In one process a tied parameter is one object, unless sharding has made two of it."""
        held = {f"{stage}.{name}": p for stage, name, p in self._held_parameters()}
        if group is None:
            alone = Placement.loop(1, self._schedule.num_stages)
            ties = declared_ties(names, held, alone, 0)
            return Ties(ties, 0, {}, self.modules) if ties else None
        rank, placement = dist.get_rank(group), self._schedule.placement
        with self._control.together(cannot(BUILDING)):
            ties = declared_ties(names, held, placement, rank)
            if not isinstance(stages, Mapping):
                known = {tie.parameter for tie in ties}
                ties += [tie for tie in find_ties(stages, placement) if tie.parameter not in known]
        groups = connect_holders(ties, group)
        return Ties(ties, rank, groups, self.modules) if ties else None
