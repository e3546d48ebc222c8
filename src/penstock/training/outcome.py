"""How a step ended, gathered from all ranks: the loss, or which rank failed first."""

import struct
from dataclasses import astuple, dataclass
from typing import NoReturn

import torch

from penstock.errors import PipelineError
from penstock.ranks.control import Control
from penstock.ranks.faults import Fault, StepFailedError
from penstock.step.crossing_hooks import ADVICE
from penstock.step.step_data import Results

__all__ = ["Outcome", "gather_outcome", "raise_first_fault", "raise_unknown_hooks"]

# Whether this rank has failed, whether it has a loss, and the loss; whether it sent hooks that
# their receivers do not know, and whether a stage took gradients through what it received.
_RECORD = struct.Struct("!??d??")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a step on all ranks together."""

    has_failed: bool
    loss: float | None
    has_unknown_hooks: bool
    has_inner_passes: bool


def gather_outcome(
    control: Control,
    results: Results,
    failure: StepFailedError | None,
    *,
    has_unknown_hooks: bool = False,
    has_inner_passes: bool = False,
) -> Outcome:
    """Return whether any rank has failed, the loss of the whole batch, and facts about hooks."""
    mine = 0.0
    if results.losses:
        losses = torch.stack([loss for loss, _ in results.losses]).double()
        weights = losses.new_tensor([weight for _, weight in results.losses])
        mine = float((losses * weights).sum())
    hooks = has_unknown_hooks, has_inner_passes
    record = _RECORD.pack(failure is not None, bool(results.losses), mine, *hooks)
    everyone = [_RECORD.unpack(data) for data in control.gather_bytes(record)]
    losses_known = [loss for _, has_loss, loss, _, _ in everyone if has_loss]
    return Outcome(
        has_failed=any(record[0] for record in everyone),
        loss=sum(losses_known) if losses_known else None,
        has_unknown_hooks=any(record[3] for record in everyone),
        has_inner_passes=any(record[4] for record in everyone),
    )


def raise_first_fault(control: Control, failure: StepFailedError | None) -> NoReturn:
    """Raise, on every rank, the error of the rank that failed first."""
    mine = None if failure is None else astuple(Fault.of(failure))
    first = min(Fault(*fault) for fault in control.gather(mine) if fault)
    if failure is not None and first == Fault.of(failure):
        raise failure
    raise PipelineError(f"{first.message}\n\nas reported by that rank:\n{first.trace}")


def raise_unknown_hooks() -> NoReturn:
    """Raise, on every rank, that a gradient may have missed a hook of another stage."""
    raise PipelineError(
        "hooks on tensors that cross stages must be there from the first step with such a batch, "
        "because stages of this model take gradients through what they receive (got one later); "
        f"repeat the step, which looks again, or {ADVICE}"
    )
