"""How a step ended, gathered from all ranks: the loss, or which rank failed first."""

import struct
from dataclasses import astuple, dataclass
from typing import NoReturn

import torch

from penstock.errors import PipelineError
from penstock.ranks.control import Control
from penstock.ranks.faults import Fault, StepFailedError
from penstock.step.executor import Results

__all__ = ["Outcome", "gather_outcome", "raise_first_fault"]

# Whether this rank has failed, whether it has a loss, and the loss.
_RECORD = struct.Struct("!??d")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a step on all ranks together."""

    has_failed: bool
    loss: float | None


def gather_outcome(control: Control, results: Results, failure: StepFailedError | None) -> Outcome:
    """Return whether any rank has failed, and the loss of the whole batch."""
    mine = 0.0
    if results.losses:
        losses = torch.stack([loss for loss, _ in results.losses]).double()
        weights = losses.new_tensor([weight for _, weight in results.losses])
        mine = float((losses * weights).sum())
    record = _RECORD.pack(failure is not None, bool(results.losses), mine)
    everyone = [_RECORD.unpack(data) for data in control.gather_bytes(record)]
    losses_known = [loss for _, has_loss, loss in everyone if has_loss]
    return Outcome(
        has_failed=any(has_failed for has_failed, _, _ in everyone),
        loss=sum(losses_known) if losses_known else None,
    )


def raise_first_fault(control: Control, failure: StepFailedError | None) -> NoReturn:
    """Raise, on every rank, the error of the rank that failed first."""
    mine = None if failure is None else astuple(Fault.of(failure))
    first = min(Fault(*fault) for fault in control.gather(mine) if fault)
    if failure is not None and first == Fault.of(failure):
        raise failure
    raise PipelineError(f"{first.message}\n\nas reported by that rank:\n{first.trace}")
