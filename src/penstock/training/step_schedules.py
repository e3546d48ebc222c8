"""Which lowered schedule a step runs, for any number of microbatches."""

from dataclasses import dataclass

from penstock.assembly import build, lower
from penstock.checks.report import check
from penstock.errors import ArgumentError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.passes.reroute import reroute
from penstock.passes.thin import thin_out
from penstock.schedules.forward_only import forward_only_on
from penstock.schedules.registry import find_family

__all__ = ["ScheduleSource", "count_microbatches", "default_ranks", "number_of_copies"]


def count_microbatches(given: str | Schedule, asked_for: int | None) -> int:
    """How many microbatches a step has: as many as are asked for, or as the schedule is for."""
    if asked_for is not None:
        return asked_for
    if isinstance(given, str):
        raise ArgumentError(f"say how many microbatches {given} is for: microbatches=...")
    return given.microbatches


def default_ranks(given: str | Schedule, num_stages: int) -> int:
    """How many ranks these stages make, as far as the schedule says."""
    if isinstance(given, Schedule):
        return given.num_ranks
    return max(1, num_stages // find_family(given).stages_per_rank)


def number_of_copies(given: str | Schedule) -> int:
    """How many copies of the model the stages of this schedule are."""
    if isinstance(given, Schedule):
        return max(given.dataflow.stream_of_stage) + 1
    return find_family(given).copies


@dataclass(frozen=True, slots=True)
class ScheduleSource:
    """Makes the schedule of a step, from a family or from a schedule that was given.

    `dataflow` is that between the parts of the model, where the model has one of its own.
    """

    given: str | Schedule
    num_stages: int
    num_ranks: int
    dataflow: Dataflow | None = None

    def training(self, microbatches: int) -> Schedule:
        """The schedule of a training step, checked but not lowered unless it was given so."""
        if isinstance(self.given, Schedule):
            schedule = self._rerouted(thin_out(self.given, microbatches))
            check(schedule)
        else:
            schedule = self._rerouted(
                build(
                    self.given,
                    ranks=self.num_ranks,
                    microbatches=microbatches,
                    stages_per_rank=self._stages_per_rank(),
                )
            )
        if (schedule.num_stages, schedule.num_ranks) != (self.num_stages, self.num_ranks):
            raise SizeError(
                f"the schedule is for {schedule.num_stages} stages on {schedule.num_ranks} ranks, "
                f"but there are {self.num_stages} stages on {self.num_ranks}"
            )
        return schedule

    def _rerouted(self, schedule: Schedule) -> Schedule:
        """The schedule with the model's own dataflow, if it is for as many parts."""
        flow, parts = self.dataflow, schedule.dataflow.parts
        if flow is None or flow.num_stages != schedule.dataflow.num_parts:
            return schedule
        return schedule if schedule.dataflow == flow.with_parts(parts) else reroute(schedule, flow)

    def lowered(self, microbatches: int, *, is_training: bool) -> Schedule:
        """What a step runs, proven to finish; evaluation has the stages where training has."""
        schedule = self.training(self._known_count(microbatches))
        if not is_training:
            schedule = forward_only_on(schedule.placement, schedule.dataflow, microbatches)
        elif schedule.microbatches != microbatches:
            raise SizeError(f"{schedule.name} was given for {schedule.microbatches} microbatches")
        if not schedule.has_communication:
            schedule = lower(schedule)
        check(schedule)
        return schedule

    def _known_count(self, microbatches: int) -> int:
        if isinstance(self.given, Schedule):
            return min(microbatches, self.given.microbatches)
        return microbatches

    def _stages_per_rank(self) -> int:
        if self.num_stages % self.num_ranks:
            raise SizeError(
                f"{self.num_stages} stages do not go evenly into {self.num_ranks} ranks; "
                "give a Schedule with a placement of its own"
            )
        return self.num_stages // self.num_ranks
