"""One step on this process, in the same phases on every rank.

agree on the batch -> split it -> run the schedule -> flush messages -> gather the outcome
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.alive.guard import Guard
from penstock.alive.progress_log import AGREEMENT, FLUSH, OUTCOME
from penstock.errors import BatchError
from penstock.loss.reduction import Reduction
from penstock.loss.weigher import Weigher
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.step.clocks import clock_for
from penstock.step.executor import Executor
from penstock.step.layer_random import KnowsLayers, LayerRandom
from penstock.step.microbatches import find_dims, merge_outputs
from penstock.step.step_data import LossFunction, Microbatches, Results, StepRecording
from penstock.torch_private import profiler_enabled
from penstock.training.batch.agreement import Agreed, BatchAgreement
from penstock.training.batch.batch import BatchFacts, accepted_arguments, unwrap
from penstock.training.batch.capture import find_capture
from penstock.training.batch.request import StepRequest
from penstock.training.batch.written_keywords import WrittenKeywords
from penstock.training.build.assemble import Assembly
from penstock.training.loss_function import takes_target, with_target
from penstock.training.loss_value import LossExchange, LossValue, are_on_device, copy_losses
from penstock.training.options import RunOptions
from penstock.training.step_result import StepResult
from penstock.training.steps.executors import Executors
from penstock.training.steps.outcome import (
    Outcome,
    gather_outcome,
    raise_first_fault,
    raise_unknown_hooks,
)
from penstock.training.steps.recorded_step import join_recordings
from penstock.training.steps.weighing import Weighing
from penstock.training.ties import Ties

__all__ = ["Merge", "StepRunner", "StepSettings"]

# Joins the outputs of the microbatches, one tensor of each at a time.
Merge = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What the user chose for every step of a pipeline."""

    loss: LossFunction | None
    reduction: Reduction
    merge: Merge | None
    options: RunOptions


class StepRunner:
    """Runs the steps of one pipeline on this process, together with the other ranks."""

    def __init__(
        self,
        assembly: Assembly,
        settings: StepSettings,
        ties: Ties | None,
        random: LayerRandom | None,
        parameters: Sequence[nn.Parameter],
        losses: LossExchange | None = None,
    ) -> None:
        loss = settings.loss
        self.transport = assembly.transport
        self.control = assembly.control
        self.guard: Guard = assembly.guard
        self.guards = assembly.guards
        self.ties = ties
        # Shares losses that are on devices; None in one process, which has them all.
        self._losses = losses
        self._wait_for_device = assembly.wait_for_device
        self._close_channels = assembly.close_channels
        self.needs_target = loss is None or takes_target(loss)
        self._part = assembly.part
        self._settings = settings
        self._random = random
        self._parameters = tuple(parameters)
        self._loss = None if loss is None else with_target(loss)
        self._weighing = Weighing(
            settings.reduction, makes_own=not self.needs_target, merge=settings.merge
        )
        self._weighing.expect_apart(self._part.schedule, self.transport.ranks)
        self._accepted = {
            index: accepted_arguments(stage.module) for index, stage in self._part.stages.items()
        }
        stages = self._part.stages.items()
        self._by_hand = [i for i, s in stages if not isinstance(unwrap(s.module), KnowsLayers)]
        self._agreement = BatchAgreement(
            self.control,
            self._part.schedule,
            self._accepted.values(),
            compares_data=settings.options.compare_data,
        )
        # Parameters whose gradients a step that fails must set back to None.
        self._without_gradients: list[nn.Parameter] = []
        # The form of the last request, if it was plain, and what was said of it.
        self._form: tuple[object, ...] | None = None
        self._facts: BatchFacts | None = None
        self._executors = Executors(assembly, self._loss, settings.options.around)

    def run(self, request: StepRequest, random_step: int) -> StepResult:
        """Run a step; every rank calls this. `random_step` is what random numbers depend on."""
        with self.guard.call():
            try:
                return self._run_phases(request, random_step)
            except LinkLostError:
                self._abandon_step()
                raise

    def settle(self) -> None:
        """Wait until a device has finished its steps; raise an error if a rank is lost.

        A step may be queued that has messages from a rank that is gone. On a processor a step
        that has returned is finished.
        """
        if self._part.device.type == "cpu":
            return
        self._wait_for_device()
        self.guard.require_nobody_lost()

    def close(self) -> None:
        """Finish what the device has to do, leave the other ranks and free what connects them."""
        try:
            self.settle()
        finally:
            if self._losses is not None:
                self._losses.close()
            self._close_channels()
            self._part.overlaps.close()
            self.guards.close()
            if self.ties is not None:
                self.ties.close()

    def _run_phases(self, request: StepRequest, random_step: int) -> StepResult:
        log = self.guard.log
        log.begin_step()
        log.start(AGREEMENT)
        agreed, signature = self._agree(request)
        size = len(agreed.rows.rows)
        lowered, executor = self._executors.find(size, is_training=request.is_training)
        self._begin_step(signature, request.is_training, random_step)
        log.end()
        results, recording, merged, failure = Results(), None, None, None
        weigher: Weigher | None = None
        try:
            batch = self._split(request, agreed, executor)
            weigher = batch.weigher
            written = self._watch_keywords(batch, agreed)
            recording = self._execute(executor, batch, results, request)
            self._check(written, weigher)
            merged = self._merge_outputs(results)
        except StepFailedError as error:
            failure = error
        log.start(FLUSH)
        self.transport.end_step()
        log.end()
        loss, timeline = self._finish(request, results, failure, weigher), None
        if recording is not None:
            timeline = join_recordings(self.control, lowered, recording)
        return StepResult(loss, merged, timeline)

    def _agree(self, request: StepRequest) -> tuple[Agreed, bytes]:
        """Return what all ranks know of the batch, and a name for it."""
        return self._agreement.agree(
            self._add_own_errors(self._describe(request), request),
            request.values,
            request.named,
            mode=self._mode(),
            is_recorded=request.is_recorded,
        )

    def _describe(self, request: StepRequest) -> BatchFacts:
        """Describe a request; one of the same form as the last gets the very same description."""
        form = request.form
        if form is None or form != self._form or self._facts is None:
            self._form = form
            self._facts = request.describe(
                needs_target=self.needs_target,
                uses_target=self.needs_target or self._weighing.counts_target,
            )
        return self._facts

    def _add_own_errors(self, facts: BatchFacts, request: StepRequest) -> BatchFacts:
        """Add what this rank knows of its stages and ties, so that all ranks refuse the step."""
        captured = find_capture(self._part.device, is_shared=self._losses is not None)
        if error := captured or self._find_extra_argument(request):
            facts = replace(facts, error=error)
        if self.ties is None:
            return facts
        facts = replace(facts, trained_ties=self.ties.are_trained())
        if (replaced := self.ties.find_replaced()) is None:
            return facts
        return replace(
            facts,
            error=(
                f"{replaced!r} is shared with another rank and was replaced by another parameter "
                "after the pipeline was built; build the pipeline again, or change its values"
            ),
        )

    def _find_extra_argument(self, request: StepRequest) -> str | None:
        """Return an error if a first stage is given more positional arguments than it takes."""
        given, flow = len(request.args), self._part.schedule.dataflow
        for stage, accepted in self._accepted.items():
            most = accepted.most_positional
            if not flow.producers(stage) and most is not None and given > most:
                return (
                    f"stage {stage} must be given at most {most} positional arguments (got "
                    f"{given}); pass the target by name, as target=..."
                )
        return None

    def _mode(self) -> tuple[bytes, torch.dtype | None]:
        """Return what else may change between steps and decides what goes between stages."""
        kind = self._part.device.type
        cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return bytes(parameter.requires_grad for parameter in self._parameters), cast_to

    def _begin_step(self, signature: bytes, is_training: bool, random_step: int) -> None:
        self.transport.begin_step(signature)
        if self._random is not None:
            self._random.begin_step(random_step)
        if is_training:
            self._without_gradients = [p for p in self._parameters if p.grad is None]
            # Ties first: they put away what the gradients held, which copies of a stage do too.
            if self.ties is not None:
                self.ties.begin_step()
            for stage in self._part.stages.values():
                stage.replica.begin_step()

    def _split(self, request: StepRequest, agreed: Agreed, executor: Executor) -> Microbatches:
        """Return this rank's microbatches; what cannot be split fails the step on every rank."""
        try:
            labels = request.split_labels(len(agreed.rows.rows)) if agreed.lacks_labels else None
            counts = self._weighing.ask_for_counts(self.control, agreed, labels)
            weigh = partial(
                self._weighing.make,
                agreed,
                told=counts,
                is_training=request.is_training,
                dims=find_dims(request.target) or find_dims(request.values) or [0],
            )
            return request.split(agreed, self._accepted, weigh, self.needs_target)
        except LinkLostError:
            raise
        except Exception as error:
            executor.abandon()
            raise self._failure(error) from error

    def _execute(
        self, executor: Executor, batch: Microbatches, results: Results, request: StepRequest
    ) -> StepRecording | None:
        with torch.set_grad_enabled(request.is_training):
            if request.is_recorded:
                return executor.record(batch, results, clock_for(self._part.device))
            run = executor.profile if profiler_enabled() else executor.run
            run(batch, results)
        return None

    def _watch_keywords(self, batch: Microbatches, agreed: Agreed) -> WrittenKeywords:
        """Watch what stages of other ranks get too; cut models know themselves what they write."""
        kwargs = {index: batch.kwargs[index] for index in self._by_hand}
        return WrittenKeywords(kwargs, agreed.shared)

    def _check(self, *checks: WrittenKeywords | Weigher) -> None:
        """Fail the step on every rank if a keyword was written to, or a loss weighed wrongly."""
        try:
            for each in checks:
                each.check()
        except Exception as error:
            raise self._failure(error) from error

    def _merge_outputs(self, results: Results) -> Any:
        """Return this rank's outputs as one; if they do not fit, the step fails on every rank."""
        outputs = [results.outputs[number] for number in sorted(results.outputs)]
        try:
            return merge_outputs(outputs, self._settings.merge) if outputs else None
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StepFailedError:
        return StepFailedError(f"rank {self.transport.ranks[0]}", error)

    def _finish(
        self,
        request: StepRequest,
        results: Results,
        failure: StepFailedError | None,
        weigher: Weigher | None,
    ) -> float | LossValue | None:
        """Learn how the step ended on all ranks; return its loss, or raise the first failure."""
        log = self.guard.log
        log.start(OUTCOME)
        stages = self._part.stages.values()
        outcome = gather_outcome(
            self.control,
            results.losses,
            failure,
            has_unknown_hooks=self.transport.has_unknown_hooks,
            has_inner_passes=any(stage.inner_passes.were_seen for stage in stages),
        )
        if outcome.has_failed:
            self._abandon_step()
            raise_first_fault(self.control, failure)
        if outcome.has_unknown_hooks and outcome.has_inner_passes:
            self._abandon_step()
            raise_unknown_hooks()
        try:
            self._weighing.compare(self.control, weigher)
        except BatchError:
            self._abandon_step()
            raise
        self.transport.remember_shapes()
        if outcome.has_unknown_hooks:
            self.transport.forget_shapes()
        loss = self._take_loss(outcome, results)
        if request.is_training and self.ties is not None:
            self.ties.end_step()
        log.end()
        return loss

    def _take_loss(self, outcome: Outcome, results: Results) -> float | LossValue | None:
        """Return the loss of the batch, without waiting for a device."""
        if not outcome.is_loss_on_device:
            return outcome.loss
        mine = copy_losses(results.losses) if are_on_device(results.losses) else None
        if self._losses is not None:
            return self._losses.share(outcome.loss or 0.0, mine)
        return mine

    def _abandon_step(self) -> None:
        for stage in self._part.stages.values():
            stage.clear()
        if self.ties is not None:
            self.ties.abandon_step()
        for parameter in self._without_gradients:
            parameter.grad = None
        self.transport.forget_shapes()
