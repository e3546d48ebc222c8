"""One process's part of a case: steps of a pipeline, each compared with the unsplit model."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.alive.timeouts import Timeouts
from penstock.checkpoint.checkpoints import Checkpoints
from penstock.ir.actions import Action, Kind
from penstock.loss.reduction import Reduction
from penstock.step.step_data import Around
from penstock.tools.soak.cases import FaultKind, InjectedFault, SoakCase
from penstock.tools.soak.models import count_tokens, make_case
from penstock.tools.verify.case import Case
from penstock.tools.verify.reference import GradientError, largest_error, run_unsplit
from penstock.training.options import RunOptions
from penstock.training.pipeline import Pipeline

__all__ = ["SILENCE_SECONDS", "SoakFaultError", "SoakFindings", "run_case"]

# Parameters are multiplied by this after a step, so that the next step has different ones.
_SHRINKING = 0.97
# How long a rank may be silent before it is given up.
SILENCE_SECONDS = 9.0


class SoakFaultError(RuntimeError):
    """The error of a rank whose fault is to raise."""


@dataclass(frozen=True, slots=True)
class SoakFindings:
    """The number of steps, and the largest error in them."""

    steps: int
    worst: GradientError


def run_case(
    case: SoakCase,
    around: Mapping[Kind, Around] | None,
    group: dist.ProcessGroup | None,
    folder: Path,
) -> SoakFindings:
    """Run the steps of a case, as a rank of the group or as all ranks.

    Gradients are kept from one step to the next or not, and every step has other parameters.
    What is saved after one of them is loaded at the end, and must be what it was then. `around` is
    put around the actions as in `Pipeline`, `folder` is for flight records and checkpoints.
    """
    flow = case.schedule.dataflow
    cases = [make_case(case.model, batch) for batch in case.batches]
    running, expected = cases[0], deepcopy(cases[0])
    fault = _Fault(case.fault, group)
    copied, group = _replicate(case, group, running.stages)
    pipeline = Pipeline(
        [copied[part] for part in flow.parts],
        case.schedule,
        loss=running.loss,
        reduction=_reduction(case),
        group=group,
        options=RunOptions(
            around=fault.around if around is None else around, fault_injection=case.fault_injection
        ),
        timeouts=Timeouts(SILENCE_SECONDS, folder=folder),
    )
    worst = GradientError(0.0, "")
    saved: dict[str, torch.Tensor] = {}
    with Checkpoints(folder / f"case-{case.number}") as checkpoints:
        for number, given in enumerate(cases):
            fault.step = number
            reference = replace(given, stages=expected.stages)
            worst = max(worst, _run_step(case, pipeline, reference, number))
            if number == case.saved_after:
                checkpoints.save(number, pipeline)
                saved = {name: value.clone() for name, value in pipeline.state_dict().items()}
        if case.saved_after is not None:
            _load(checkpoints, pipeline, saved)
    return SoakFindings(len(cases), worst)


def _load(checkpoints: Checkpoints, pipeline: Pipeline, saved: Mapping[str, torch.Tensor]) -> None:
    """Load what was saved into parameters that have lost their numbers."""
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.fill_(torch.nan)
    checkpoints.load(pipeline)
    for name, value in pipeline.state_dict().items():
        if not torch.equal(value, saved[name]):
            raise RuntimeError(f"{name} was not loaded as it was saved")


def _replicate(
    case: SoakCase, world: dist.ProcessGroup | None, stages: Sequence[nn.Module]
) -> tuple[Sequence[nn.Module], dist.ProcessGroup | None]:
    """Return this rank's stages, wrapped if they have copies, and the group of its pipeline."""
    if case.replicas == 1:
        return stages, world
    ranks, me = case.schedule.num_ranks, dist.get_rank()
    pipelines = [list(range(n * ranks, (n + 1) * ranks)) for n in range(case.replicas)]
    groups = [dist.new_group(members) for members in pipelines]
    copies = [dist.new_group(list(members)) for members in zip(*pipelines, strict=True)]
    own = {case.schedule.dataflow.parts[s] for s in case.schedule.placement.stages(me % ranks)}
    wrapped = [
        DistributedDataParallel(module, process_group=copies[me % ranks])
        if part in own and any(p.requires_grad for p in module.parameters())
        else module
        for part, module in enumerate(stages)
    ]
    return wrapped, groups[me // ranks]


def _unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _reduction(case: SoakCase) -> Reduction:
    match case.model.weighing:
        case "tokens":
            return count_tokens
        case "sum":
            return "sum"
        case "rows":
            return "mean"


def _run_step(case: SoakCase, pipeline: Pipeline, reference: Case, number: int) -> GradientError:
    """Run one step of both, and return the largest error."""
    flow, is_training = case.schedule.dataflow, not case.schedule.is_forward_only
    run = pipeline.step if is_training else pipeline.evaluate
    loss = run(*reference.args, target=reference.target).loss
    assert loss is not None, "a step with a target has a loss"
    with torch.set_grad_enabled(is_training):
        unsplit = run_unsplit(reference, flow)
    error = abs(loss - unsplit.item()) / max(1.0, abs(unsplit.item()))
    worst = GradientError(error if error == error else float("inf"), f"the loss of step {number}")
    if is_training:
        torch.autograd.backward(unsplit)
        found = [
            (flow.parts[stage], _unwrap(module)) for stage, module in pipeline.modules.items()
        ]
        furthest = largest_error(found, reference.stages)
        worst = max(worst, replace(furthest, name=f"{furthest.name} in step {number}"))
        if case.batches[number].seed % 2:
            _forget_gradients([*reference.stages, *pipeline.modules.values()])
        _move(found, reference.stages)
    return worst


def _forget_gradients(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.zero_grad()


def _move(found: Sequence[tuple[int, nn.Module]], expected: Sequence[nn.Module]) -> None:
    """Change the parameters of the unsplit model, and those of the pipeline to the same values.

    Two trainings of their own would drift apart from rounding alone.
    """
    with torch.no_grad():
        for parameter in {p for module in expected for p in module.parameters()}:
            parameter.mul_(_SHRINKING)
        for part, module in found:
            pairs = zip(module.parameters(), expected[part].parameters(), strict=True)
            for parameter, reference in pairs:
                parameter.copy_(reference)


class _Fault:
    """A fault that happens on its rank, in its step, in place of its action."""

    def __init__(self, fault: InjectedFault | None, group: dist.ProcessGroup | None) -> None:
        self._fault = fault
        self._is_here = (
            fault is not None and group is not None and dist.get_rank(group) == fault.rank
        )
        self.step = 0

    @property
    def around(self) -> Mapping[Kind, Around]:
        """Functions to be called around actions; none on the other ranks."""
        return {self._fault.action.kind: self._around} if self._fault and self._is_here else {}

    def _around(self, action: Action, call: Callable[[], None]) -> None:
        fault = self._fault
        if fault is not None and (action, self.step) == (fault.action, fault.step):
            _HAPPEN[fault.kind]()
        call()


def _raise() -> None:
    raise SoakFaultError("the soak made this rank fail")


def _nothing() -> None:
    """Do nothing: a rank that is dropped is cut off by its transport."""


_HAPPEN: dict[FaultKind, Callable[[], object]] = {
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), SIGKILL),
    "stop": lambda: os.kill(os.getpid(), SIGSTOP),
    "drop": _nothing,
}
