"""Runs the steps of one schedule object: opens its session, binds its programs, cleans up."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.alive.timeouts import Timeouts
from penstock.dropin.run.facts import describe_module
from penstock.dropin.run.lowered import Lowered
from penstock.dropin.run.session import Program, Session, make_program, open_session
from penstock.dropin.run.step_actions import Owner, StepActions, StepBatch
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.errors import SizeError
from penstock.ranks.faults import StepFailedError
from penstock.ranks.group_transport import GroupTransport

__all__ = ["StepRunner"]


class StepRunner:
    """The session and the programs of a schedule object, as long as its order stays the same."""

    def __init__(self) -> None:
        self.actions = StepActions()
        self._lowered: Lowered | None = None
        self._session: Session | None = None
        self._programs: dict[bool, Program] = {}

    @property
    def rows(self) -> int | None:
        """How many rows the batch of the present step has, if that is known here."""
        return None if self._session is None else self._session.rows

    @property
    def knows_shapes(self) -> bool:
        """Whether the shapes of the last step were known before it began."""
        transport = None if self._session is None else self._session.transport
        return isinstance(transport, GroupTransport) and transport.knows_shapes

    def open(
        self,
        find_lowered: Callable[[], Lowered],
        stages: Sequence[_PipelineStageBase],
        timeouts: Timeouts,
    ) -> Session:
        """Return the session of the present order; every rank calls this before every step."""
        if self._session is not None and self._find_again(find_lowered) is self._lowered:
            return self._session

        def prepare() -> Lowered:
            lowered = find_lowered()
            _require_own_stages(lowered, stages)
            for stage in stages if lowered.is_split else ():
                stage.expect_halves()
            return lowered

        self._programs.clear()
        self._lowered, self._session = open_session(prepare, stages[0], timeouts)
        return self._session

    def _find_again(self, find_lowered: Callable[[], Lowered]) -> Lowered:
        """Return the present order; if it cannot be found here, no other rank waits for it."""
        assert self._session is not None, "it was found before"
        try:
            return find_lowered()
        except Exception:
            with self._session.call(is_guarded=True):
                raise

    def run(
        self,
        owner: Owner,
        stages: Sequence[_PipelineStageBase],
        batch: StepBatch,
        context: Any,
        given: str,
        rows: int | None,
        *,
        has_backward: bool,
    ) -> None:
        """Run this rank's actions, with what must be done before and after.

        `given` describes to other ranks what this one was given; `rows` is the number of rows of
        its batch.
        """
        assert self._session is not None, "a step is run inside its session"
        held = {stage.stage_index: stage for stage in stages}
        program = self._find_program(held, has_backward)
        if given:
            given += "".join(describe_module(stage.submod) for stage in stages)
        self._session.meet(f"{has_backward}{given}", rows)
        self.actions.begin(
            owner,
            held,
            program.executor,
            batch,
            context=context,
            overlaps=program.overlaps,
            settle=self._session.settle,
            refuse=self._session.refuse,
        )
        has_failed = True
        try:
            self._begin(owner, stages, program, has_backward)
            program.run()
            has_failed = False
        finally:
            for stage in stages:
                stage.end_training(has_failed=has_failed)
            self.actions.end(has_failed=has_failed)

    def _begin(
        self,
        owner: Owner,
        stages: Sequence[_PipelineStageBase],
        program: Program,
        has_backward: bool,
    ) -> None:
        """Make the stages ready; if one cannot be, let the other ranks get to the end."""
        assert self._session is not None, "a step is run inside its session"
        factor = owner._n_microbatches if owner.scale_grads else 1
        try:
            for stage in stages:
                stage.is_run = True
                if has_backward:
                    stage.begin_training(factor)
        except Exception:
            self._session.settle()
            program.executor.abandon()
            raise

    def _find_program(
        self, stages: Mapping[int, _PipelineStageBase], has_backward: bool
    ) -> Program:
        assert self._session is not None, "a step is run inside its session"
        assert self._lowered is not None, "a session is that of an order"
        if has_backward not in self._programs:
            lowered = self._lowered
            schedule = lowered.training if has_backward else lowered.evaluation
            perform = self.actions.perform
            self._programs[has_backward] = make_program(self._session, schedule, stages, perform)
        return self._programs[has_backward]

    def own_error(self, failure: StepFailedError) -> BaseException:
        """Return what has failed on this rank, with a note where that was."""
        error = failure.__cause__ or failure
        action = self.actions.current
        if action is not None and self._session is not None:
            rows, rank = self._session.schedule.rows, self._session.rank
            here = range(int(rows.first[rank]), int(rows.first[rank + 1]))
            position = [rows.action(row) for row in here].index(action)
            error.add_note(f"while running {action}, at position {position} of its rank")
        return error


def _require_own_stages(lowered: Lowered, stages: Sequence[_PipelineStageBase]) -> None:
    """Refuse stages that are placed for another schedule."""
    placement, rank = lowered.training.placement, stages[0].group_rank
    held = sorted(stage.stage_index for stage in stages)
    wanted = sorted(placement.stages(rank))
    if held != wanted:
        raise SizeError(
            f"rank {rank} holds the stages {held}, but its schedule places {wanted} there; give "
            f"each rank the stages of {placement.rank_of_stage} (by stage, the rank that holds it)"
        )
