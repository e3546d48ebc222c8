"""The user's object: stages and a schedule in, training steps out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from penstock.alive.timeouts import DEFAULT_TIMEOUTS, Timeouts
from penstock.errors import PipelineError
from penstock.ir.schedule import Schedule
from penstock.loss.reduction import Reduction
from penstock.planner.plans import Plan
from penstock.ranks.abortable_sockets import Connections
from penstock.splitting.pipe import Pipe
from penstock.step.step_data import LossFunction
from penstock.training.batch.request import StepRequest
from penstock.training.build.assemble import BuildRequest, Modules, assemble
from penstock.training.build.membership import find_group
from penstock.training.build.rank_facts import RankFacts
from penstock.training.build.seeding import seed_stages
from penstock.training.clip import clip_gradients, total_norm
from penstock.training.held_model import HeldModel
from penstock.training.loss_value import share_losses
from penstock.training.options import DEFAULT_OPTIONS, RunOptions
from penstock.training.scaler import unscale
from penstock.training.shared_parameters import merge_names, names_of_shared, ties_of
from penstock.training.step_result import StepResult
from penstock.training.steps.step_runner import Merge, StepRunner, StepSettings
from penstock.training.ties import keep_ties
from penstock.training.whole_state import copy_state, gather_state, guard_original

__all__ = ["Pipeline"]


class Pipeline:
    """Trains the stages of a model in the order of a schedule.

    `stages` is a `Pipe`, the modules of all stages in order (this process keeps its own), or a
    mapping from stage to module with just those of this process. `schedule` is the name of a
    family, a CSV file, a `Schedule` or a `Plan`; all but the name bring their number of
    `microbatches`. With `group` (a process group, or one dimension of a device mesh) every process
    is one rank; without it, this process runs all `ranks`. The stages run where their parameters
    are; `device` is needed only where these do not say it.

    >>> stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    >>> pipeline = Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss())
    >>> pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4)).loss > 0
    True

    `loss(output, target)` returns the loss of a microbatch, or `loss(output)` if the model
    computes its own. `reduction` says how these make up the loss of the batch: "auto" finds out
    what the unsplit model computes on it, "mean" is a mean over rows, "sum" a sum, and a function
    a mean over what it counts in the target, or the `labels`, of one microbatch. `merge` joins the
    microbatches' outputs, one tensor of each at a time; without it they are concatenated along
    dimension 0. `ties` names parameters that are one and the same on several ranks, where identity
    does not show it; see `penstock.training.shared_parameters`. With `seed`, random numbers inside
    stages depend on seed, step, layer and microbatch alone, so that dropout is the same for every
    layout. `timeouts` says how long to wait for a rank that does not answer, and `options` how
    steps are run.

    Close a pipeline, or use it in a `with` statement, to leave the other ranks and free its
    connections before the program ends.
    """

    def __init__(
        self,
        stages: Pipe | Modules,
        schedule: str | Path | Schedule | Plan,
        *,
        microbatches: int | None = None,
        loss: LossFunction | None = None,
        reduction: Reduction = "auto",
        group: dist.ProcessGroup | DeviceMesh | None = None,
        ranks: int | None = None,
        device: torch.device | str | None = None,
        merge: Merge | None = None,
        ties: Sequence[Sequence[str]] = (),
        seed: int | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        options: RunOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._group = find_group(group)
        facts = RankFacts(loss is not None, reduction, ties, seed, options)
        request = BuildRequest(stages, schedule, facts, microbatches, self._group, ranks, device)
        assembly = assemble(request, fault_injection=options.fault_injection, timeouts=timeouts)
        pipe, part = request.pipe, assembly.part
        self._part = part
        self._routes = dict(assembly.routes)
        self._stages = part.stages
        shared = merge_names(names_of_shared(pipe, assembly.modules, ties))
        self._model = HeldModel(self.modules, pipe is not None, shared)
        tied = ties if pipe is None else [*ties, *ties_of(pipe)]
        with assembly.guard.call(), assembly.guard.tracking():
            kept = keep_ties(assembly, tied, self._group)
        parts = part.schedule.dataflow.parts
        random = None if seed is None else seed_stages(seed, part.stages, parts, part.device)
        settings = StepSettings(loss, reduction, merge, options)
        own = tuple(self.parameters())
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in own)
        self._can_train = loss is not None
        self._is_forward_only = part.schedule.is_forward_only
        losses = share_losses(self._group, assembly.guard)
        self._runner: StepRunner | None = StepRunner(assembly, settings, kept, random, own, losses)
        self._random_step = 0
        if pipe is not None:
            guard_original(pipe, self, {parts[stage] for stage in part.stages})

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
        if not self._can_train:
            raise PipelineError("a training step needs a loss; give Pipeline(loss=...)")
        if self._is_forward_only:
            raise PipelineError(
                f"{self.schedule.name} has no backwards to train with; call evaluate, or use "
                "another schedule"
            )
        count = self._part.microbatches
        request = StepRequest(
            True, count, args, kwargs, target, return_outputs, record, gradient_scale
        )
        result = self._running().run(request, self._random_step)
        self._random_step += 1
        return result

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = True,
        record: bool = False,
        microbatches: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run one batch forward only, without a graph; the result has a loss if given a target.

        The stages run in the mode that they are in: call `eval` first if they use dropout.
        """
        count = self._part.microbatches if microbatches is None else microbatches
        request = StepRequest(
            False, count, args, kwargs, target, return_outputs, record, gradient_scale=1.0
        )
        return self._running().run(request, self._random_step)

    def train(self, mode: bool = True) -> Self:
        """Set this process's stages to training mode, or to evaluation mode with `False`."""
        for module in self.modules.values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set this process's stages to evaluation mode, as in `nn.Module`; see `evaluate`."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this process's parameters."""
        for module in self.modules.values():
            module.zero_grad(set_to_none)

    def close(self) -> None:
        """Leave the other ranks and free connections; closing again does nothing.

        Parameters and `state_dict` stay available; steps and whatever else needs the other ranks
        raise an error from now on.
        """
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> StepRunner:
        if self._runner is None:
            raise PipelineError("the pipeline is closed; build another one to continue")
        return self._runner

    def __repr__(self) -> str:
        schedule = self.schedule
        ranks = [schedule.placement.rank_of_stage[stage] for stage in self._stages]
        left = sum(map(len, self.undeferred_weights.values())) if self._random_step else 0
        overlaps = self._part.overlaps.describe()
        return (
            f"<Pipeline {schedule.name}, {self._part.microbatches} microbatches: stages "
            f"{list(self._stages)} of {schedule.num_stages} as ranks {sorted(set(ranks))} of "
            f"{schedule.num_ranks} on {self.device}{self._describe_routes()}"
            f"{f', {left} weights finished in I' if left else ''}"
            f"{f', {overlaps}' if overlaps else ''}"
            f"{', closed' if self._runner is None else ''}>"
        )

    def _describe_routes(self) -> str:
        kinds = sorted(set(self.routes.values()))
        return f", messages by {' and '.join(kinds)}" if kinds else ""

    @property
    def routes(self) -> dict[tuple[int, int], str]:
        """What carries messages, "peer memory", "nccl" or "gloo", by (source, destination)."""
        return self._routes

    @property
    def schedule(self) -> Schedule:
        """The schedule of a full training step, without communication unless it was given so."""
        return self._part.schedule

    @property
    def device(self) -> torch.device:
        """The device that this process's stages run on; values from other ranks arrive there."""
        return self._part.device

    @property
    def undeferred_weights(self) -> dict[int, list[str]]:
        """The weights of each stage here whose gradients I has finished, leaving nothing for W.

        These have hooks, are in checkpointed blocks, or are used otherwise than in a product.
        """
        found = {index: stage.undeferred_weights() for index, stage in self._stages.items()}
        return {index: names for index, names in found.items() if names}

    @property
    def random_step(self) -> int:
        """The number of training steps that ended well: what random numbers are drawn for.

        This is all that `seed` needs to continue a run: a checkpoint saves this number, and sets
        it on every rank before the next step.
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
        """Yield this process's parameters, once each.

        Names are the model's own if it came as a `Pipe`, else as in `nn.Sequential` of all stages.
        """
        return self._model.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, once each, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return this process's parameters and buffers, named as by `named_parameters`."""
        if self._runner is not None:
            self._runner.settle()
        return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this process's parameters and buffers from its part of a state, or from the whole.

        Names are those of `state_dict`. Names that this process does not hold belong to other
        ranks and are ignored; with `strict`, every name that it holds must be given.
        """
        self._model.load_state_dict(state, strict=strict)

    def full_state_dict(self, *, ranks: Sequence[int] = (0,)) -> dict[str, Any]:
        """Return the whole model's parameters and buffers, copied to the host memory of `ranks`.

        Every rank calls it, those of every replica too; all other ranks get nothing. Names are
        those of `state_dict`; those of one parameter have one tensor.
        """
        own, runner = self.state_dict(), self._running()
        if self._group is None:
            return copy_state(own, self._model.shared_names)
        connections = Connections()
        guarded = runner.guard.call(connections.abort, is_shared=self._is_sharded)
        with guarded, runner.guard.tracking():
            return gather_state(
                own, self._model.shared_names, runner.control, self._group, connections, ranks
            )

    def exchange(self, value: Any) -> list[Any]:
        """Return the plain values that all ranks give, in the order of ranks."""
        runner = self._running()
        with runner.guard.call():
            return runner.control.gather(value)

    @property
    def rank(self) -> int:
        """The number of this process among those of the pipeline; 0 if it runs all ranks."""
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def shared_names(self) -> dict[str, str]:
        """Further names of parameters that have several, on any rank, and the first of each."""
        return dict(self._model.shared_names)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradients by the norm of the whole model's, and return that norm.

        Every rank calls it, after its steps and before its optimizer, and gets the same norm.
        """
        runner, own = self._running(), list(self.parameters())
        elsewhere = frozenset() if runner.ties is None else runner.ties.counted_elsewhere
        with runner.guard.call(is_shared=self._is_sharded):
            norm = total_norm(own, norm_type, runner.control, counted_elsewhere=elsewhere)
        clip_gradients(own, max_norm, norm)
        return norm

    def unscale_(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients like `scaler.unscale_`, with the same outcome on all ranks.

        For steps with `gradient_scale=scaler.get_scale()`. Every rank calls it before
        `scaler.step(optimizer)` and `scaler.update()`, which then do the same on every rank.
        """
        runner = self._running()
        with runner.guard.call():
            unscale(scaler, optimizer, runner.control)

    def guarded(
        self, abort: Callable[[], None], *, group: dist.ProcessGroup | None = None
    ) -> AbstractContextManager[None]:
        """Guard something else that all ranks do at the same time, such as saving a checkpoint.

        If a rank is lost meanwhile, another thread calls `abort`, which must end whatever the
        inside waits for; all ranks then raise the same `PeerLostError`. `group` has the processes
        that do it together, if it is not just these ranks.
        """
        return self._running().guards.call(abort, group)
