"""One step of a schedule, compared with the unsplit model and with the prediction."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from penstock.ir.actions import Kind, Overlap
from penstock.ir.schedule import Schedule
from penstock.passes.thin import thin_out
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.tools.launcher import Report, run_on_ranks
from penstock.tools.verify.activations import ActivationCounter
from penstock.tools.verify.case import in_double
from penstock.tools.verify.models import load_case
from penstock.tools.verify.reference import (
    GradientError,
    find_unreached,
    largest_error,
    run_unsplit,
)
from penstock.training.options import RunOptions
from penstock.training.pipeline import Pipeline
from penstock.units import format_number

__all__ = ["Check", "VerifyRequest", "verify"]

_LONGEST_SILENCE = 120.0
# How many weights are named in one line.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What to verify: a schedule with a model, and how far gradients may be off.

    `model` is the name of one of ours, or `module:function`; see `Case`. `rows` is the size of
    the batch of one of ours.
    """

    schedule: Schedule
    model: str
    tolerance: float = 1e-10
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: whether it holds, what was found and what was expected."""

    name: str
    is_fine: bool
    found: str
    expected: str


@dataclass(frozen=True, slots=True)
class _Findings:
    """What one process found in a step."""

    loss: float
    unsplit_loss: float
    gradients: GradientError
    unreached: list[int]
    peaks: dict[int, int]
    orders: list[list[str]]
    microbatches: int
    # How many weights a split backward could defer, and which of them it did not.
    num_weights: int
    undeferred: list[str]


def verify(request: VerifyRequest, *, uses_processes: bool = False) -> tuple[Check, ...]:
    """Run one step, in this process or with one process per rank, and check what came out.

    >>> from penstock.assembly import build
    >>> checks = verify(VerifyRequest(build("ZBV", ranks=2, microbatches=4), "mlp"))
    >>> {check.name for check in checks if check.is_fine} == {check.name for check in checks}
    True
    >>> checks[-1].found
    '48 actions as planned'
    """
    if uses_processes:
        work = partial(_run_as_member, request)
        findings = run_on_ranks(work, request.schedule.num_ranks, seconds=_LONGEST_SILENCE)
    else:
        findings = [_run_step(request, None)]
    schedule = thin_out(request.schedule, findings[0].microbatches)
    return (
        _check_gradients(request, findings),
        _check_reach(schedule, findings),
        _check_loss(request, findings),
        _check_peaks(schedule, findings),
        *_check_deferred(schedule, findings),
        _check_order(schedule, findings),
    )


def _run_as_member(request: VerifyRequest, _report: Report) -> _Findings:
    return _run_step(request, dist.group.WORLD)


def _run_step(request: VerifyRequest, group: dist.ProcessGroup | None) -> _Findings:
    schedule, flow = request.schedule, request.schedule.dataflow
    case = in_double(
        load_case(
            request.model,
            flow.num_parts,
            microbatches=schedule.microbatches,
            rows=request.rows,
        )
    )
    expected = deepcopy(case)
    counter = ActivationCounter(schedule.placement.rank_of_stage)
    pipeline = Pipeline(
        [case.stages[part] for part in flow.parts],
        schedule,
        microbatches=schedule.microbatches,
        loss=case.loss,
        group=group,
        options=RunOptions(around=counter.around),
    )
    for module in set(pipeline.modules.values()):
        counter.attach(module)
    run = pipeline.evaluate if schedule.is_forward_only else pipeline.step
    result = run(*case.args, target=case.target, record=True)
    unsplit_loss = run_unsplit(expected, flow)
    if not schedule.is_forward_only:
        unsplit_loss.backward()  # type: ignore[no-untyped-call]  # untyped upstream
    assert result.loss is not None, "a step with a target has a loss"
    assert result.timeline is not None, "the step was recorded"
    found = [(flow.parts[stage], module) for stage, module in pipeline.modules.items()]
    return _Findings(
        loss=result.loss,
        unsplit_loss=unsplit_loss.item(),
        gradients=largest_error(found, expected.stages),
        unreached=find_unreached(expected.stages),
        peaks=counter.peaks,
        orders=[_started_order(result.timeline, rank) for rank in range(schedule.num_ranks)],
        microbatches=result.timeline.schedule.microbatches,
        num_weights=sum(
            parameter.requires_grad and parameter.dim() >= 2 for parameter in pipeline.parameters()
        ),
        undeferred=[
            f"{stage}.{name}"
            for stage, names in pipeline.undeferred_weights.items()
            for name in names
        ],
    )


def _started_order(timeline: Timeline, rank: int) -> list[str]:
    """Return one rank's compute actions in the order in which they started."""
    spans = [span for span in timeline.spans(rank) if span.action.kind.is_compute]
    return [str(span.action) for span in sorted(spans, key=lambda span: span.start)]


def _check_gradients(request: VerifyRequest, findings: Sequence[_Findings]) -> Check:
    worst = max(found.gradients for found in findings)
    place = f" ({worst.name})" if worst.error > request.tolerance else ""
    return Check(
        "gradients",
        worst.error <= request.tolerance,
        f"off by {worst.error:.1e}{place}",
        f"off by {request.tolerance:g} at most",
    )


def _check_reach(schedule: Schedule, findings: Sequence[_Findings]) -> Check:
    """Check that gradients exist, because two missing ones are equal too."""
    if schedule.is_forward_only:
        return Check("stages reached", True, "none", "none, without a backward")
    unreached = findings[0].unreached
    found = f"no gradient in stage {', '.join(map(str, unreached))}" if unreached else "all"
    return Check("stages reached", not unreached, found, "all")


def _check_loss(request: VerifyRequest, findings: Sequence[_Findings]) -> Check:
    expected = findings[0].unsplit_loss
    losses = {found.loss for found in findings}
    limit = request.tolerance * max(1.0, abs(expected))
    return Check(
        "loss",
        all(abs(loss - expected) <= limit for loss in losses),
        ", ".join(f"{loss:.12g}" for loss in sorted(losses)),
        f"{expected:.12g}",
    )


def _check_peaks(schedule: Schedule, findings: Sequence[_Findings]) -> Check:
    if schedule.is_forward_only:
        return Check("peak activations", True, "none", "none, without a backward")
    predicted = simulate(schedule).rank_peak_activations
    counted = {rank: peak for found in findings for rank, peak in found.peaks.items()}
    peaks = [counted.get(rank, 0) for rank in range(schedule.num_ranks)]
    return Check(
        "peak activations", tuple(peaks) == predicted, _per_rank(peaks), _per_rank(predicted)
    )


def _check_deferred(schedule: Schedule, findings: Sequence[_Findings]) -> list[Check]:
    """Check that W has work to do if the backward is split; name what I has finished."""
    if not schedule.rows.has_kind(Kind.BACKWARD_WEIGHT):
        return []
    weights = sum(finding.num_weights for finding in findings)
    left = [name for finding in findings for name in finding.undeferred]
    found = f"{weights - len(left)} of {weights} weights"
    if left:
        found += f" (I finished {', '.join(left[:_NAMED])}{' ...' if len(left) > _NAMED else ''})"
    is_fine = len(left) < weights or not weights
    return [Check("left for W", is_fine, found, "at least one weight, if there are any")]


def _per_rank(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _check_order(schedule: Schedule, findings: Sequence[_Findings]) -> Check:
    planned = [_planned_order(schedule, rank) for rank in range(schedule.num_ranks)]
    count = format_number(sum(map(len, planned)))
    found = f"{count} actions as planned"
    for rank, (ran, expected) in enumerate(zip(findings[0].orders, planned, strict=True)):
        if ran != expected:
            found = f"rank {rank} {_first_difference(ran, expected)}"
            break
    return Check("order", findings[0].orders == planned, found, f"{count} actions as planned")


def _planned_order(schedule: Schedule, rank: int) -> list[str]:
    works = schedule.order(rank)
    actions = [
        a for work in works for a in (work.actions if isinstance(work, Overlap) else [work])
    ]
    return [str(action) for action in actions if action.kind.is_compute]


def _first_difference(ran: Sequence[str], expected: Sequence[str]) -> str:
    for position, pair in enumerate(zip(ran, expected, strict=False)):
        if pair[0] != pair[1]:
            return f"ran {pair[0]} at position {position}, where {pair[1]} is planned"
    return f"ran {len(ran)} actions, where {len(expected)} are planned"
