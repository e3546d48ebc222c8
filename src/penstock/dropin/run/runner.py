"""Runs the steps of one schedule object: opens its session, binds its programs, cleans up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.alive.timeouts import Timeouts
from penstock.dropin.run.session import Lowered, Session, open_session
from penstock.dropin.run.step_actions import StepActions, _PipelineContext
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.ir.actions import Kind
from penstock.loss.weigher import KnownWeights
from penstock.ranks.faults import StepFailedError
from penstock.step.executor import Executor
from penstock.step.overlap.overlaps import Overlaps
from penstock.step.step_data import Microbatches, Results
from penstock.torch_private import profiler_enabled
from penstock.training.batch.batch import describe_value

__all__ = ["ScheduleRunner"]

# What stages of ours would take from the executor; those here take it from their schedule.
_NOTHING = Microbatches((), {}, (), KnownWeights(()), ())


class ScheduleRunner:
    """The session and the executors of a schedule object, as long as its order stays the same."""

    def __init__(self) -> None:
        self.actions = StepActions()
        self.session: Session | None = None
        # With backwards, and without.
        self._executors: dict[bool, Executor] = {}

    @contextmanager
    def call(
        self,
        find_lowered: Callable[[], Lowered],
        stages: Sequence[_PipelineStageBase],
        timeouts: Timeouts,
        is_guarded: bool,
    ) -> Iterator[None]:
        """Be around a step, which every rank calls; a rank that fails keeps its own error."""
        session = self._open(find_lowered, stages, timeouts)
        try:
            with session.call(is_guarded=is_guarded):
                yield
            return
        except StepFailedError as error:
            failure = error
        raise self._own_error(session, failure)

    def _open(
        self,
        find_lowered: Callable[[], Lowered],
        stages: Sequence[_PipelineStageBase],
        timeouts: Timeouts,
    ) -> Session:
        """Return the session of the present order; if it is not found here, all ranks raise."""
        if self.session is not None:
            try:
                lowered = find_lowered()
            except Exception:
                with self.session.call(is_guarded=True):
                    raise
            if lowered is self.session.lowered:
                return self.session
        self._executors.clear()
        self.session = open_session(find_lowered, stages, timeouts)
        return self.session

    def run(
        self,
        stages: Sequence[_PipelineStageBase],
        context: _PipelineContext,
        rows: int | None,
        has_backward: bool,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> None:
        """Run this rank's actions, given how many rows the batch has, if this rank knows that."""
        session, held = self.session, {stage.stage_index: stage for stage in stages}
        assert session is not None, "a step is run inside its session"
        executor = self._find_executor(session, held, has_backward)
        session.meet(_describe(stages, context, has_backward), rows)
        self.actions.begin(held, executor, session, context, return_outputs, loss_kwargs)
        has_failed = True
        try:
            _begin_stages(stages, executor, context.schedule_ref if has_backward else None)
            if profiler_enabled():
                executor.profile(_NOTHING, Results(), "PP:{}".format)
            else:
                executor.run(_NOTHING, Results())
            has_failed = False
        finally:
            for stage in stages:
                stage.end_training(has_failed=has_failed)
            self.actions.end(has_failed=has_failed)

    def _find_executor(
        self, session: Session, stages: Mapping[int, _PipelineStageBase], has_backward: bool
    ) -> Executor:
        if has_backward not in self._executors:
            lowered = session.lowered
            schedule = lowered.training if has_backward else lowered.evaluation
            self._executors[has_backward] = Executor(
                schedule,
                schedule.rows.of_rank(session.rank),
                {index: stage.runtime for index, stage in stages.items()},
                session.transport,
                loss=None,
                around=dict.fromkeys(Kind, self.actions.perform),
                overlaps=Overlaps(torch.device(next(iter(stages.values())).device)),
                log=session.guard.log,
            )
        return self._executors[has_backward]

    def _own_error(self, session: Session, failure: StepFailedError) -> BaseException:
        """Return what has failed on this rank, with a note where that was."""
        error, action = failure.__cause__ or failure, self.actions.current
        if action is not None:
            rows = session.lowered.training.rows
            position = [*map(rows.action, rows.of_rank(session.rank))].index(action)
            error.add_note(f"while running {action}, at position {position} of its rank")
        return error


def _begin_stages(stages: Sequence[_PipelineStageBase], executor: Executor, trainer: Any) -> None:
    """Make stages ready; if one cannot be, let the other ranks get to the end."""
    try:
        for stage in stages:
            stage.is_run = True
            if trainer is not None:
                stage.begin_training(trainer._n_microbatches if trainer.scale_grads else 1)
    except Exception:
        executor.abandon()
        raise


def _describe(
    stages: Sequence[_PipelineStageBase], context: _PipelineContext, has_backward: bool
) -> str:
    """Say what decides, on this rank, what its stages will send."""
    if stages[0].group_size == 1:
        return ""
    args = context.arg_mbs if any(stage.is_first for stage in stages) else ()
    modules = [stage.submod for stage in stages]
    trained = [bytes(p.requires_grad for p in module.parameters()) for module in modules]
    modes = [has_backward, torch.is_grad_enabled(), *(module.training for module in modules)]
    return f"{modes}{trained}{describe_value(args)}{describe_value(context.kwarg_mbs)}"
