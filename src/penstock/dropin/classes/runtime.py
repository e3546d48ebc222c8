"""Schedules that are run from an order with all communication in it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.dropin.classes.base import _CustomFunctionProtocol
from penstock.dropin.classes.multi import Format, PipelineScheduleMulti, UnknownFormatError
from penstock.dropin.microbatch import TensorChunkSpec
from penstock.dropin.names.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    _Action,
    _ComputationType,
)
from penstock.dropin.names.csv_files import read_order, write_order
from penstock.dropin.names.lists import Order, OrderError
from penstock.dropin.names.passes import lower_order
from penstock.dropin.orders.simulation import _simulate_comms_compute
from penstock.dropin.run.lowered import Lowered
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.errors import ArgumentError, ScheduleError

__all__ = ["_PipelineScheduleRuntime"]

_logger = logging.getLogger(__name__)

_REPLACEABLE = (
    FORWARD,
    FULL_BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    OVERLAP_F_B,
    UNSHARD,
    RESHARD,
    REDUCE_GRAD,
)


class _PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule that is run from `pipeline_order_with_comms`.

    Subclass it and set that, or an order of compute through `_prepare_schedule_with_comms`; or
    load either from a file. At most `max_active_stages` of a rank are gathered at once; how far
    ahead gathers begin follows from that, so `unshard_lookahead` changes nothing.
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
        defer_pp_recv: bool = False,
        *,
        max_active_stages: int = 3,
        unshard_lookahead: Any = "auto",
    ) -> None:
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        rest = (use_full_backward, scale_grads, backward_requires_autograd)
        super().__init__(stages, n_microbatches, loss_fn, *specs, *rest)
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
        """Let a function do what a kind of action does; it gets the action and a context.

        The parts of an overlap are done as usual, unless overlaps have a function themselves.
        """
        if computation_type not in _REPLACEABLE:
            known = ", ".join(kind.name for kind in _REPLACEABLE)
            raise ArgumentError(
                f"{computation_type} cannot be replaced; these kinds of action can: {known}"
            )
        if computation_type in self._comp_type_to_function_map:
            _logger.warning("%s had a custom function already", computation_type)
        self._comp_type_to_function_map[computation_type] = custom_function

    def _prepare_schedule_with_comms(
        self,
        actions: Order,
        format: Format = "compute_only",  # noqa: A002  # torch's name
    ) -> None:
        """Take an order: of compute, which is lowered here, or with all communication in it."""
        match format:
            case "compute_only":
                _check_compute_only(actions)
                self._validate_and_set_stage_mapping(actions)
                self.pipeline_order_with_comms = self._lower(actions)
                if not self._defer_pp_recv:
                    self._safe_order = self.pipeline_order_with_comms
            case "compute_comms":
                self._validate_and_set_stage_mapping(actions)
                self.pipeline_order_with_comms = _without_idle(actions)
            case _:
                raise UnknownFormatError(
                    f'an order has the format "compute_only" or "compute_comms" (got {format!r})'
                )

    def _lower(self, order: Order) -> dict[int, list[_Action]]:
        return lower_order(
            order,
            self.stage_index_to_group_rank.__getitem__,
            self._num_stages,
            self._n_microbatches,
            defer_pp_recv=self._defer_pp_recv,
            max_active_stages=self._max_active_stages,
        )

    def _load_csv(self, filename: Path | str, format: Format = "compute_only") -> None:  # noqa: A002  # torch's name
        """Read an order from a file and take it."""
        order = read_order(filename)
        self._prepare_schedule_with_comms(order, format)
        if format == "compute_only":
            self.pipeline_order = order

    def _dump_csv(self, filename: Path | str, format: Format = "compute_comms") -> None:  # noqa: A002  # torch's name
        """Write the order to a file, with its communication or without."""
        match format:
            case "compute_only":
                write_order(self.pipeline_order, filename)
            case "compute_comms":
                write_order(self.pipeline_order_with_comms, filename)
            case _:
                raise UnknownFormatError(f"an order has no format {format!r}")

    def _simulate(self) -> Order:
        """Return the order as it would run in slots of one action each."""
        holder = self.stage_index_to_group_rank
        return _simulate_comms_compute(
            self.pipeline_order_with_comms, holder.__getitem__, self._num_stages
        )

    def _assert_unsharded(self, stage: _PipelineStageBase) -> None:
        """Wait until the parameters of a stage are gathered."""
        self._runner.actions.assert_unsharded(stage)

    def _find_lowered(self) -> Lowered:
        if not self.pipeline_order_with_comms:
            self._prepare_schedule_with_comms(self.pipeline_order)
        order: Any = self.pipeline_order_with_comms
        return self._read(order, lambda same: same, sends_may_wait=order is self._safe_order)  # type: ignore[arg-type,return-value]  # it has no idle slots


def _check_compute_only(actions: Order) -> None:
    for rank, order in actions.items():
        for position, action in enumerate(order):
            if action is not None and not action.is_compute_op:
                raise ScheduleError(
                    f"rank {rank}, position {position}: {action} is not compute; leave it out "
                    'of an order of compute only, or give format="compute_comms"'
                )


def _without_idle(actions: Order) -> dict[int, list[_Action]]:
    order: dict[int, list[_Action]] = {rank: [] for rank in actions}
    for rank, slots in actions.items():
        for position, action in enumerate(slots):
            if action is None:
                raise OrderError(
                    f"rank {rank}, position {position}: an order with communication has no idle "
                    "slots; time is what comes out when it runs"
                )
            order[rank].append(action)
    return order
