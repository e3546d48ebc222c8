"""How a step ended, gathered from all ranks: the loss, or which rank failed first."""

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NoReturn

from penstock.errors import PipelineError
from penstock.ranks.control import Control
from penstock.ranks.faults import Fault, StepFailedError
from penstock.step.crossing_hooks import ADVICE
from penstock.step.step_data import KeptLoss
from penstock.training.loss_value import add_up, are_on_device

__all__ = ["Outcome", "gather_outcome", "raise_first_fault", "raise_unknown_hooks"]

# Whether this rank has failed; whether it has losses on the host, and their sum; whether it has
# losses on a device; whether it sent hooks that their receivers do not know, and whether a stage
# took gradients through what it received.
_RECORD = struct.Struct("!??d???")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a step on all ranks together, as far as hosts know it.

    `loss` is the sum of what is on hosts, if anything is. With `is_loss_on_device`, the rest of
    the loss is on a device of some rank.
    """

    has_failed: bool
    loss: float | None
    is_loss_on_device: bool
    has_unknown_hooks: bool
    has_inner_passes: bool


def gather_outcome(
    control: Control,
    losses: Sequence[tuple[KeptLoss, float]],
    failure: StepFailedError | None,
    *,
    has_unknown_hooks: bool = False,
    has_inner_passes: bool = False,
) -> Outcome:
    """Return whether any rank has failed, the loss of the whole batch, and facts about hooks.

    No rank waits for a device: a failure is known before anybody can use the gradients.
    """
    is_on_device = are_on_device(losses)
    is_on_host = bool(losses) and not is_on_device
    record = _RECORD.pack(
        failure is not None,
        is_on_host,
        add_up(losses) if is_on_host else 0.0,
        is_on_device,
        has_unknown_hooks,
        has_inner_passes,
    )
    everyone = [_RECORD.unpack(data) for data in control.gather_bytes(record)]
    known = [record[2] for record in everyone if record[1]]
    return Outcome(
        has_failed=any(record[0] for record in everyone),
        loss=sum(known) if known else None,
        is_loss_on_device=any(record[3] for record in everyone),
        has_unknown_hooks=any(record[4] for record in everyone),
        has_inner_passes=any(record[5] for record in everyone),
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
