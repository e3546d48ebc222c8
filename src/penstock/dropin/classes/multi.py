"""Schedules with several stages per rank, run from an order of compute or one with messages."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.dropin.classes.base import _PipelineSchedule
from penstock.dropin.microbatch import TensorChunkSpec
from penstock.dropin.names.actions import KIND_OF_TYPE, OVERLAP_F_B, _Action, _ComputationType
from penstock.dropin.names.lists import (
    Order,
    OrderError,
    generate_stage_to_rank_mapping,
    list_actions,
    make_schedule,
    read_order,
    write_order,
)
from penstock.dropin.names.passes import lower_order
from penstock.dropin.names.validation import _validate_schedule
from penstock.dropin.orders.slots import _simulate_comms_compute
from penstock.dropin.run.session import Lowered
from penstock.dropin.run.step_actions import _CustomFunctionProtocol
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.values import Named
from penstock.errors import ArgumentError, PipelineError, ScheduleError
from penstock.ir.schedule import Schedule

__all__ = ["PipelineScheduleMulti", "_PipelineScheduleRuntime"]

_logger = logging.getLogger(__name__)

Format = Literal["compute_only", "compute_comms"]
# What a function of the user's may do: everything but messages.
_OTHERS = [kind for kind, ours in KIND_OF_TYPE.items() if not ours.is_communication]
_REPLACEABLE = (OVERLAP_F_B, *_OTHERS)


class UnknownFormatError(ArgumentError, NotImplementedError, AssertionError):
    """An order has no such format; torch's users expect one of these errors here."""


class PipelineScheduleMulti(_PipelineSchedule):
    """Several stages per rank, run from `pipeline_order`; `scale_grads` as with one stage."""

    _defer_pp_recv = False
    _max_active_stages = 3

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
        self._stages, first = stages, stages[0]
        self.rank, self.pp_group_size = first.group_rank, first.group_size
        self._num_stages = first.num_stages
        sizes = self.pp_group_size, self._num_stages
        self._set_stage_mapping(generate_stage_to_rank_mapping(*sizes))
        self._backward_requires_autograd = backward_requires_autograd
        self.pipeline_order: Order = {}
        # What was last run, and the order that it was made from.
        self._lowered: tuple[Order, Lowered] | None = None

    def _set_stage_mapping(self, mapping: dict[int, int]) -> None:
        self.stage_index_to_group_rank = mapping
        for stage in self._stages:
            stage.stage_index_to_group_rank = mapping

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        sizes = self.pp_group_size, self._num_stages, self._n_microbatches
        self._set_stage_mapping(_validate_schedule(actions, *sizes))

    def _dump_csv(self, filename: Path | str) -> None:
        write_order(self.pipeline_order, filename)

    def _load_csv(self, filename: Path | str, format: Format = "compute_only") -> None:  # noqa: A002  # torch's name
        if format != "compute_only":
            raise UnknownFormatError(f'format is "compute_only" here (got {format!r})')
        order = read_order(filename)
        self._validate_and_set_stage_mapping(order)
        self.pipeline_order = order

    def _initialize_stages(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Named = None
    ) -> None:
        super()._initialize_stages(args, kwargs, target, loss_kwargs)
        self._validate_adjacent_stage_communication()

    def _validate_adjacent_stage_communication(self) -> None:
        for stage in self._stages:
            sources = {info.source for info in stage.args_recv_info.get(0, ())}
            destinations = {to for stages in stage.act_send_info.values() for to in stages}
            index = stage.stage_index
            skipped = (sources - {index - 1, None}) | (destinations - {index + 1, None})
            if skipped:
                raise PipelineError(
                    "schedules of several stages per rank do adjacent-stage communication only, "
                    f"but stage {index} talks to {sorted(map(str, skipped))}; use a schedule of "
                    "one stage per rank"
                )

    def _check_grad_mode(self) -> None:
        if self._backward_requires_autograd:
            super()._check_grad_mode()

    def _find_lowered(self) -> Lowered:
        return self._keep(self.pipeline_order, lambda order: Lowered(self._lower(order), True))

    def _keep(self, order: Any, make: Callable[[Order], Lowered]) -> Lowered:
        """Return what an order says; it may have been set or changed since it was run before."""
        if self._lowered is None or self._lowered[0] != order:
            kept = {rank: list(actions) for rank, actions in order.items()}
            self._lowered = kept, make(kept)
        return self._lowered[1]

    def _lower(self, order: Order) -> Schedule:
        return lower_order(
            order,
            self.stage_index_to_group_rank,
            self._n_microbatches,
            receives="late" if self._defer_pp_recv else self._receives,
            max_active_stages=self._max_active_stages,
        )


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule run from `pipeline_order_with_comms`; `unshard_lookahead` changes nothing."""

    def __init__(
        self,
        *args: Any,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Any = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        del unshard_lookahead
        if max_active_stages < 1:
            raise ArgumentError(f"max_active_stages must be 1 or more (got {max_active_stages})")
        self._max_active_stages = max_active_stages
        self._defer_pp_recv = defer_pp_recv
        self.pipeline_order_with_comms: dict[int, list[_Action]] = {}
        # An order that was lowered here, where sends may wait for their receives.
        self._safe_order: dict[int, list[_Action]] | None = None
        under_way = self._runner.actions
        self.backward_counter = under_way.backward_counter
        self.fwd_recv_ops = under_way.fwd_recv_ops
        self.bwd_recv_ops = under_way.bwd_recv_ops
        self.unshard_ops = under_way.unshard_ops
        self.unsharded_stages = under_way.unsharded_stages
        self._comp_type_to_function_map = under_way.custom_functions

    def register_custom_function(
        self, computation_type: _ComputationType, custom_function: _CustomFunctionProtocol
    ) -> None:
        """Let a function do what a kind of action does; it gets the action and a context."""
        if computation_type not in _REPLACEABLE:
            known = ", ".join(kind.name for kind in _REPLACEABLE)
            raise ArgumentError(f"{computation_type} cannot be replaced; these can: {known}")
        if computation_type in self._comp_type_to_function_map:
            _logger.warning("%s had a custom function already", computation_type)
        self._comp_type_to_function_map[computation_type] = custom_function

    def _prepare_schedule_with_comms(
        self,
        actions: Order,
        format: Format = "compute_only",  # noqa: A002  # torch's name
    ) -> None:
        """Take an order: of compute, which is lowered here, or with all communication in it."""
        _check_format(format)
        is_compute = format == "compute_only"
        _check_actions(actions, is_compute=is_compute)
        self._validate_and_set_stage_mapping(actions)
        if is_compute:
            self._safe_order = list_actions(self._lower(actions))
            self.pipeline_order_with_comms = self._safe_order
        else:
            # There are no idle slots in it.
            self.pipeline_order_with_comms = {
                rank: [action for action in slots if action is not None]
                for rank, slots in actions.items()
            }

    def _load_csv(self, filename: Path | str, format: Format = "compute_only") -> None:  # noqa: A002  # torch's name
        order = read_order(filename)
        self._prepare_schedule_with_comms(order, format)
        if format == "compute_only":
            self.pipeline_order = order

    def _dump_csv(self, filename: Path | str, format: Format = "compute_comms") -> None:  # noqa: A002  # torch's name
        _check_format(format)
        is_compute = format == "compute_only"
        write_order(
            self.pipeline_order if is_compute else self.pipeline_order_with_comms, filename
        )

    def _simulate(self) -> Order:
        order, rank_of = self.pipeline_order_with_comms, self.stage_index_to_group_rank
        return _simulate_comms_compute(order, rank_of.__getitem__, self._num_stages)

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        self._runner.actions.assert_unsharded(stage)

    def _find_lowered(self) -> Lowered:
        if not self.pipeline_order_with_comms:
            self._prepare_schedule_with_comms(self.pipeline_order)
        order, rank_of = self.pipeline_order_with_comms, self.stage_index_to_group_rank
        is_safe, count = order is self._safe_order, self._n_microbatches
        return self._keep(
            order, lambda kept: Lowered(make_schedule(kept, rank_of, count), is_safe)
        )


def _check_format(name: str) -> None:
    if name not in ("compute_only", "compute_comms"):
        raise UnknownFormatError(f'format is "compute_only" or "compute_comms" (got {name!r})')


def _check_actions(actions: Order, *, is_compute: bool) -> None:
    """Refuse anything but compute in an order of compute, and idle slots in any other."""
    for rank, order in actions.items():
        for position, action in enumerate(order):
            place = f"rank {rank}, position {position}"
            if is_compute and action is not None and not action.is_compute_op:
                raise ScheduleError(
                    f"{place}: {action} is not compute; leave it out of an order of compute only, "
                    'or give format="compute_comms"'
                )
            if not is_compute and action is None:
                raise OrderError(f"{place}: an order with communication has no idle slots")
