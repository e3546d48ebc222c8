"""What runs a step: one executor per number of microbatches and mode, made when first used."""

from collections.abc import Mapping, Sequence

from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.step.executor import Executor
from penstock.step.program.entries import order_for_one_process
from penstock.step.step_data import Around, LossFunction
from penstock.training.build.assemble import Assembly

__all__ = ["Executors"]


class Executors:
    """The lowered schedules of a pipeline, each with the executor of this process."""

    def __init__(
        self, assembly: Assembly, loss: LossFunction | None, around: Mapping[Kind, Around]
    ) -> None:
        self._part, self._transport = assembly.part, assembly.transport
        self._log = assembly.guard.log
        self._loss, self._around = loss, around
        self._found: dict[tuple[int, bool], tuple[Schedule, Executor]] = {}

    def find(self, microbatches: int, *, is_training: bool) -> tuple[Schedule, Executor]:
        """Return what all ranks run on this many microbatches, and what runs it here."""
        key = microbatches, is_training
        if key not in self._found:
            lowered = self._part.schedules.lowered(microbatches, is_training=is_training)
            executor = Executor(
                lowered,
                self._rows(lowered),
                self._part.stages,
                self._transport,
                loss=self._loss,
                around=self._around,
                overlaps=self._part.overlaps,
                log=self._log,
            )
            self._found[key] = lowered, executor
        return self._found[key]

    def _rows(self, lowered: Schedule) -> Sequence[int]:
        """Return the rows of the schedule that this process runs, in order."""
        if len(self._transport.ranks) == self._transport.num_ranks:
            return order_for_one_process(lowered)
        (rank,) = self._transport.ranks
        return lowered.rows.of_rank(rank)
