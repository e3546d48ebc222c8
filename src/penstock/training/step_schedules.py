"""The schedules of steps: built once per number of microbatches, then lowered and checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from penstock.assembly import generate, lower
from penstock.checks.report import check
from penstock.errors import ArgumentError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.passes.reroute import reroute
from penstock.passes.thin import thin_out
from penstock.planner.plans import Plan
from penstock.ranks.ordered_channels import is_carried_on_device
from penstock.schedules.forward_only import forward_only_on
from penstock.schedules.registry import find_family

__all__ = [
    "Receives",
    "StepSchedules",
    "count_microbatches",
    "default_ranks",
    "number_of_copies",
    "read_schedule",
    "receives_for",
]

# Where a step starts to receive: as early as possible, or right before the use.
Receives: TypeAlias = Literal["early", "late"]


def receives_for(group: dist.ProcessGroup | None, device: torch.device) -> Receives:
    """Return where receives cost least; one that waits on a device takes a part of it."""
    is_on_device = group is not None and is_carried_on_device(group, device)
    return "late" if is_on_device else "early"


def read_schedule(given: str | Path | Schedule | Plan) -> str | Schedule:
    """Return the schedule that was given, read from its CSV file or plan, or a family's name."""
    match given:
        case Plan():
            return given.schedule
        case Path():
            return Schedule.from_csv(given)
        case str() if given.lower().endswith(".csv"):
            return Schedule.from_csv(given)
        case str() | Schedule():
            return given
        case _:
            raise ArgumentError(
                "schedule must be the name of a family, a CSV file, a Schedule or a Plan (got "
                f"{type(given).__name__}); make one from a function with build(function, "
                "ranks=..., microbatches=...)"
            )


def count_microbatches(given: str | Schedule, microbatches: int | None) -> int:
    """Return the number of microbatches of a step: as given, else that of the schedule."""
    if microbatches is not None:
        return microbatches
    if isinstance(given, str):
        raise ArgumentError(
            "microbatches is required when the schedule is given by name (schedule: "
            f"{given!r}); give microbatches=..."
        )
    return given.microbatches


def default_ranks(given: str | Schedule, num_stages: int) -> int:
    """Return the number of ranks that this many stages need, as far as the schedule says."""
    if isinstance(given, Schedule):
        return given.num_ranks
    return max(1, num_stages // find_family(given).stages_per_rank)


def number_of_copies(given: str | Schedule) -> int:
    """Return how many copies of the model the stages of this schedule make up."""
    if isinstance(given, Schedule):
        return max(given.dataflow.stream_of_stage) + 1
    return find_family(given).copies


class StepSchedules:
    """Builds each schedule once, and checks once what is run.

    `schedule` is the order of a full training step, without communication unless it was given
    with it. `dataflow` is the one between the parts of the model, if the model has its own, and
    `place` returns the one that it has where stages share ranks as in a schedule.
    """

    def __init__(
        self,
        given: str | Schedule,
        microbatches: int,
        num_stages: int,
        num_ranks: int,
        dataflow: Dataflow | None = None,
        place: Callable[[Schedule], Dataflow] | None = None,
    ) -> None:
        self._receives: Receives = "early"
        self._given = given
        self._sizes = num_stages, num_ranks
        self._dataflow = dataflow
        self._place = place
        self.schedule = self._build(microbatches)
        self._lowered = {(microbatches, True): _lower(self.schedule, self._receives)}

    def place_receives(self, receives: Receives) -> None:
        """Lower again, with receives where they cost least for what carries the messages."""
        if receives != self._receives:
            self._receives = receives
            self._lowered = {key: _lower(self.schedule, receives) for key in self._lowered}

    def lowered(self, microbatches: int, *, is_training: bool) -> Schedule:
        """Return what a step runs, proven to finish; evaluation does not move the stages."""
        key = microbatches, is_training
        if key not in self._lowered:
            self._lowered[key] = _lower(
                self._build(microbatches) if is_training else self._evaluation(microbatches),
                self._receives,
            )
        return self._lowered[key]

    def _evaluation(self, microbatches: int) -> Schedule:
        return forward_only_on(self.schedule.placement, self.schedule.dataflow, microbatches)

    def _build(self, microbatches: int) -> Schedule:
        """Build the order of a training step, with the model's own dataflow if it has one."""
        num_stages, num_ranks = self._sizes
        if isinstance(self._given, Schedule):
            schedule = thin_out(self._given, microbatches)
        else:
            per_rank = _stages_per_rank(num_stages, num_ranks)
            schedule = generate(
                self._given, ranks=num_ranks, microbatches=microbatches, stages_per_rank=per_rank
            )
        schedule = self._reroute(schedule)
        if (schedule.num_stages, schedule.num_ranks) != self._sizes:
            raise SizeError(
                f"the schedule must fit the stages and ranks (schedule: {schedule.num_stages} "
                f"stages on {schedule.num_ranks} ranks, here: {num_stages} on {num_ranks}); build "
                "it for these, or change the stages or ranks"
            )
        return schedule

    def _reroute(self, schedule: Schedule) -> Schedule:
        """Use the model's own dataflow, if the schedule has as many parts.

        A schedule with messages keeps them, whether or not its author knew what ranks can share.
        """
        flow, parts = self._dataflow, schedule.dataflow.parts
        if flow is None or flow.num_stages != schedule.dataflow.num_parts:
            return schedule
        placed = flow if self._place is None else self._place(schedule)
        allowed = [placed, flow] if schedule.has_communication else [placed]
        if schedule.dataflow in [one.with_parts(parts) for one in allowed]:
            return schedule
        return reroute(schedule, placed)


def _stages_per_rank(num_stages: int, num_ranks: int) -> int:
    if num_stages % num_ranks:
        raise SizeError(
            f"stages must be a multiple of ranks (got {num_stages} stages, {num_ranks} ranks); "
            "give a Schedule with a placement of its own"
        )
    return num_stages // num_ranks


def _lower(schedule: Schedule, receives: Receives) -> Schedule:
    """Add communication where there is none, and check the result."""
    if schedule.has_communication:
        check(schedule)
        return schedule
    try:
        lowered = lower(schedule, receives=receives)
        check(lowered)
    except Exception:
        # A mistake in the schedule itself is reported at the position that its author knows.
        check(schedule)
        raise
    return lowered
