"""Schedules with one stage per rank."""

from collections.abc import Callable
from typing import Any

import torch

from penstock.dropin.classes.base import _PipelineSchedule
from penstock.dropin.microbatch import TensorChunkSpec
from penstock.dropin.names.actions import FORWARD, _Action
from penstock.dropin.names.lists import Order
from penstock.dropin.names.passes import lower_order
from penstock.dropin.orders.tables import build_order
from penstock.dropin.run.session import Lowered
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
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(n_microbatches, loss_fn, *specs, scale_grads)
        self._stage = stage
        self._num_stages = stage.num_stages
        self._stage_forward_initialized = False
        self._stage_backward_initialized = False
        self.pipeline_order: Order | None = self._get_pipeline_order()
        self._lowered: Lowered | None = None

    def _get_pipeline_order(self) -> Order | None:
        """Return every rank's order, where there is one."""
        return None

    @property
    def _initialized(self) -> tuple[bool, bool]:
        return self._stage_forward_initialized, self._stage_backward_initialized

    @property
    def _own_stages(self) -> list[_PipelineStageBase]:
        return [self._stage]

    def _prepare_stages(self, args: Any, kwargs: Any, target: Any, loss_kwargs: Any) -> None:
        self._initialize_stage(args, kwargs, target, loss_kwargs)

    def _initialize_stage(
        self,
        args: Any,
        kwargs: Any,
        target: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        done = self._initialize_pp_stages(
            [self._stage], args, kwargs, target, *self._initialized, loss_kwargs
        )
        self._stage_forward_initialized, self._stage_backward_initialized = done

    def _find_lowered(self) -> Lowered:
        if self._lowered is None:
            order = self._get_pipeline_order() or self._forward_order()
            compute = {
                rank: [action for action in actions if action and action.is_compute_op]
                for rank, actions in order.items()
            }
            holder = {stage: stage for stage in range(self._num_stages)}
            edges, count = self._stage.find_edges(), self._n_microbatches
            schedule = lower_order(compute, holder, count, edges=edges, receives=self._receives)
            self._lowered = Lowered(schedule, sends_may_wait=True)
        return self._lowered

    def _forward_order(self) -> Order:
        return {
            stage: [_Action(stage, FORWARD, number) for number in range(self._n_microbatches)]
            for stage in range(self._num_stages)
        }


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
        super()._step_microbatches(arg_mbs, kwarg_mbs, None, None, return_outputs, loss_kwargs)


class ScheduleGPipe(PipelineScheduleSingle):
    """All microbatches forward, then all backward."""

    def _get_pipeline_order(self) -> Order:
        return build_order("GPipe", self._num_stages, self._n_microbatches)


class Schedule1F1B(PipelineScheduleSingle):
    """One forward and one backward in turn, after a few forwards."""

    def _get_pipeline_order(self) -> Order:
        stages, microbatches = self._num_stages, self._n_microbatches
        if microbatches < stages:
            raise SizeError(
                f"1F1B takes at least one microbatch per stage (microbatches: {microbatches}, "
                f"stages: {stages}); use {stages} or more, or GPipe"
            )
        return build_order("1F1B", stages, microbatches)
