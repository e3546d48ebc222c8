"""Schedules with several stages per rank, run from an order of compute."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.dropin.classes.base import _PipelineSchedule
from penstock.dropin.microbatch import TensorChunkSpec
from penstock.dropin.names.actions import _Action
from penstock.dropin.names.csv_files import read_order, write_order
from penstock.dropin.names.lists import Order, generate_stage_to_rank_mapping
from penstock.dropin.names.passes import lower_order
from penstock.dropin.names.validation import _validate_schedule
from penstock.dropin.run.lowered import Lowered, read_lowered
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.errors import ArgumentError, ScheduleError

__all__ = ["Format", "PipelineScheduleMulti", "UnknownFormatError"]

_logger = logging.getLogger(__name__)

Format = Literal["compute_only", "compute_comms"]


class UnknownFormatError(ArgumentError, NotImplementedError, AssertionError):
    """An order has no such format; torch's users expect one of these errors here."""


class SkippedStageError(ScheduleError, RuntimeError):
    """A stage talks to one that is not next to it."""


class PipelineScheduleMulti(_PipelineSchedule):
    """A schedule with several stages per rank, run from `pipeline_order`.

    Gradients are divided by the number of microbatches, for losses that are means; for losses
    that are sums, set `scale_grads=False`.
    """

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        super().__init__(n_microbatches, loss_fn, *specs, scale_grads)
        if use_full_backward is not None:
            _logger.warning("use_full_backward has no effect any more; leave it out")
        self._stages = stages
        self._num_stages = stages[0].num_stages
        self.pp_group_size = stages[0].group_size
        self.rank = stages[0].group_rank
        self._set_stage_mapping(
            generate_stage_to_rank_mapping(self.pp_group_size, self._num_stages)
        )
        self._stages_forward_initialized = False
        self._stages_backward_initialized = False
        self._backward_requires_autograd = backward_requires_autograd
        self.pipeline_order: Order = {}
        # What was last run, and the order that it was made from.
        self._lowered: tuple[Order, Lowered] | None = None

    def _set_stage_mapping(self, mapping: dict[int, int]) -> None:
        self.stage_index_to_group_rank = mapping
        for stage in self._stages:
            stage.stage_index_to_group_rank = mapping

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Make sure that an order can be run, and read from it which rank holds which stage."""
        self._set_stage_mapping(
            _validate_schedule(actions, self.pp_group_size, self._num_stages, self._n_microbatches)
        )

    def _dump_csv(self, filename: Path | str) -> None:
        """Write the order to a file, one row per rank."""
        write_order(self.pipeline_order, filename)

    def _load_csv(self, filename: Path | str, format: Format = "compute_only") -> None:  # noqa: A002  # torch's name
        """Read an order of compute from a file, and check it."""
        if format != "compute_only":
            raise UnknownFormatError(f'format is "compute_only" here (got {format!r})')
        order = read_order(filename)
        self._validate_and_set_stage_mapping(order)
        self.pipeline_order = order

    @property
    def _is_prepared(self) -> bool:
        is_trained = self._stages_backward_initialized
        return self._stages_forward_initialized and is_trained == self._has_backward

    @property
    def _own_stages(self) -> list[_PipelineStageBase]:
        return self._stages

    def _prepare_stages(self, args: Any, kwargs: Any, target: Any, loss_kwargs: Any) -> None:
        self._initialize_stages(args, kwargs, target, loss_kwargs)

    def _initialize_stages(
        self,
        args: Any,
        kwargs: Any,
        target: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        done = (self._stages_forward_initialized, self._stages_backward_initialized)
        self._stages_forward_initialized, self._stages_backward_initialized = (
            self._initialize_pp_stages(self._stages, args, kwargs, target, *done, loss_kwargs)
        )
        self._validate_adjacent_stage_communication()

    def _validate_adjacent_stage_communication(self) -> None:
        """Refuse values that skip stages."""
        for stage in self._stages:
            sources = {info.source for info in stage.args_recv_info.get(0, ())}
            destinations = {to for stages in stage.act_send_info.values() for to in stages}
            index = stage.stage_index
            skipped = (sources - {index - 1, None}) | (destinations - {index + 1, None})
            if skipped:
                raise SkippedStageError(
                    f"schedules of several stages per rank do adjacent-stage communication only, "
                    f"but stage {index} talks to {sorted(map(str, skipped))}; pass the value "
                    "through the stages between, or use a schedule of one stage per rank"
                )

    def _check_grad_mode(self) -> None:
        if self._backward_requires_autograd:
            super()._check_grad_mode()

    def _find_lowered(self) -> Lowered:
        """Return what this schedule runs; the order may have been set or changed at any time."""
        return self._read(self.pipeline_order, self._lower, sends_may_wait=True)

    def _read(
        self,
        order: Order,
        lower: Callable[[Order], dict[int, list[_Action]]],
        *,
        sends_may_wait: bool,
    ) -> Lowered:
        """Return what an order says, read again if it is not the one that was run before."""
        if self._lowered is None or self._lowered[0] != order:
            kept = {rank: list(actions) for rank, actions in order.items()}
            holder, count = self.stage_index_to_group_rank, self._n_microbatches
            lowered = read_lowered(lower(kept), holder, count, sends_may_wait=sends_may_wait)
            self._lowered = kept, lowered
        return self._lowered[1]

    def _lower(self, order: Order) -> dict[int, list[_Action]]:
        holder = self.stage_index_to_group_rank
        return lower_order(order, holder.__getitem__, self._num_stages, self._n_microbatches)
