"""Schedules with one stage per rank."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from penstock.dropin._action_runner import StepBatch
from penstock.dropin.classes.base import _PipelineContext, _PipelineSchedule
from penstock.dropin.microbatch import TensorChunkSpec
from penstock.dropin.names.actions import FORWARD, _Action
from penstock.dropin.names.lists import Order
from penstock.dropin.names.passes import lower_order
from penstock.dropin.orders.tables import gpipe_order, one_f_one_b_order
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.errors import PipelineError, SizeError

__all__ = ["PipelineScheduleSingle", "Schedule1F1B", "ScheduleGPipe", "_ScheduleForwardOnly"]


class PipelineScheduleSingle(_PipelineSchedule):
    """A schedule with one stage per rank.

    Gradients are divided by the number of microbatches, for losses that are means; for losses
    that are sums, set `scale_grads=False`.
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        super().__init__(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        self._stage = stage
        self._num_stages = stage.num_stages
        self._stage_forward_initialized = False
        self._stage_backward_initialized = False
        self.pipeline_order: Order | None = self._get_pipeline_order()
        self._actions: list[_Action] = []

    def _get_pipeline_order(self) -> Order | None:
        """Every rank's order, where there is one."""
        return None

    def _initialize_stage(
        self,
        args: Any,
        kwargs: Any,
        target: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._stage_forward_initialized, self._stage_backward_initialized = (
            self._initialize_pp_stages(
                [self._stage],
                args,
                kwargs,
                target,
                self._stage_forward_initialized,
                self._stage_backward_initialized,
                loss_kwargs=loss_kwargs,
            )
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch; the outputs, on the rank of the last stage."""
        self._check_grad_mode()
        return self._run_step(
            [self._stage], args, kwargs, target, losses, return_outputs, loss_kwargs
        )

    def _lower(self, order: Order) -> list[_Action]:
        """This rank's part of an order of compute, with the messages that it needs."""
        lowered = lower_order(order, lambda s: s, self._num_stages, self._n_microbatches)
        return lowered[self._stage.stage_index]

    def _run_stage(self, batch: StepBatch, losses: list[Any] | None) -> None:
        target = None if batch.target_mbs is None else batch.target_mbs[0]
        self._initialize_stage(batch.arg_mbs[0], batch.kwarg_mbs[0], target, batch.loss_kwargs)
        context = _PipelineContext(self, losses=losses)
        self._run_actions(
            [self._stage], self._actions, batch, context=context, sends_may_wait=True
        )
        self._update_losses(self._stage, losses)


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """All microbatches forward, and nothing else."""

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if target_mbs is not None or losses is not None:
            raise PipelineError(
                "a forward-only schedule computes no losses; leave out target and losses, or use "
                "eval() of another schedule"
            )
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs)
        if not self._actions:
            self._actions = self._lower(
                {
                    stage: [_Action(stage, FORWARD, n) for n in range(self._n_microbatches)]
                    for stage in range(self._num_stages)
                }
            )
        self._run_stage(StepBatch(args, kwargs, None, return_outputs, loss_kwargs), None)


class _TrainedSingle(PipelineScheduleSingle):
    """One stage per rank, in an order that is known beforehand."""

    @abstractmethod
    def _get_pipeline_order(self) -> Order:
        """Every rank's order."""

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        if not self._actions:
            self._actions = self._lower(
                {
                    rank: [action for action in actions if action and action.is_compute_op]
                    for rank, actions in self._get_pipeline_order().items()
                }
            )
        batch = StepBatch(args, kwargs, target_mbs, return_outputs, loss_kwargs)
        self._run_stage(batch, losses)


class ScheduleGPipe(_TrainedSingle):
    """All microbatches forward, then all backward."""

    def _get_pipeline_order(self) -> Order:
        stages = self._num_stages
        return {rank: gpipe_order(rank, stages, self._n_microbatches) for rank in range(stages)}


class Schedule1F1B(_TrainedSingle):
    """One forward and one backward in turn, after a few forwards."""

    def __init__(
        self,
        stage: _PipelineStageBase,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        if n_microbatches < stage.num_stages:
            raise SizeError(
                f"1F1B takes at least one microbatch per stage (microbatches: {n_microbatches}, "
                f"stages: {stage.num_stages}); use {stage.num_stages} or more, or GPipe"
            )
        super().__init__(
            stage,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )

    def _get_pipeline_order(self) -> Order:
        stages = self._num_stages
        return {
            rank: one_f_one_b_order(rank, stages, self._n_microbatches) for rank in range(stages)
        }
