"""Torch's schedules, with one stage per rank and with several, each with its order."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from penstock.dropin.classes.base import _PipelineSchedule
from penstock.dropin.classes.multi import PipelineScheduleMulti, _PipelineScheduleRuntime
from penstock.dropin.microbatch import TensorChunkSpec
from penstock.dropin.names.lists import Order, Slots
from penstock.dropin.names.passes import lower_order
from penstock.dropin.orders.tables import add_bubbles, build_order, order_of_rank
from penstock.dropin.run.session import Lowered
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.values import Named
from penstock.errors import PipelineError, ScheduleNameError, SizeError
from penstock.modules.compiled import is_compiler_wrapper

__all__ = [
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_ScheduleForwardOnly",
    "_check_torch_compile_compatibility",
    "get_schedule_class",
]


class PipelineScheduleSingle(_PipelineSchedule):
    """One stage per rank; `scale_grads` divides gradients, for losses that are means."""

    _held = "stage"

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
        self._stage, self._stages = stage, [stage]
        self._num_stages = stage.num_stages
        self.pipeline_order: Order | None = self._get_pipeline_order()

    def _initialize_stage(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Named = None
    ) -> None:
        self._initialize_stages(args, kwargs, target, loss_kwargs)

    def _get_pipeline_order(self) -> Order | None:
        return None

    @cached_property
    def _lowered(self) -> Lowered:
        sizes = self._num_stages, self._n_microbatches
        order = self.pipeline_order or build_order("ForwardOnly", *sizes)
        compute = {
            rank: [action for action in actions if action and action.is_compute_op]
            for rank, actions in order.items()
        }
        holder, edges = {rank: rank for rank in range(sizes[0])}, self._stage.find_edges()
        receives = self._receives
        schedule = lower_order(compute, holder, sizes[1], edges=edges, receives=receives)
        return Lowered(schedule, sends_may_wait=True)

    def _find_lowered(self) -> Lowered:
        return self._lowered


class _ScheduleForwardOnly(PipelineScheduleSingle):
    """All microbatches forward, and nothing else."""

    def _check_inputs(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        if target_mbs is not None or losses is not None:
            raise PipelineError("a forward-only schedule computes no losses; give none")
        return super()._check_inputs(arg_mbs, kwarg_mbs)


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


class _Family(_PipelineScheduleRuntime):
    """A schedule whose order follows from the numbers of ranks, stages and microbatches."""

    # Its name among our schedules, if it splits backwards, and if it takes two stages per rank.
    _family: ClassVar[str]
    _is_split: ClassVar = False
    _is_v: ClassVar = False

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **gathers: Any,
    ) -> None:
        if self._is_split:
            _check_torch_compile_compatibility(stages, type(self).__name__)
        if self._is_v and len(stages) != 2:
            raise SizeError(f"{self._family} takes two stages per rank (got {len(stages)})")
        specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        rest = (None, scale_grads, backward_requires_autograd)
        more = {"defer_pp_recv": defer_pp_recv, **gathers}
        super().__init__(stages, n_microbatches, loss_fn, *specs, *rest, **more)
        self.n_local_stages = len(stages)
        self.num_stages = self._num_stages
        self.number_of_rounds = max(1, n_microbatches // self.pp_group_size)
        self.microbatches_per_round = n_microbatches // self.number_of_rounds
        self.pipeline_order = self._build_order()
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _build_order(self) -> Order:
        ranks = range(self.pp_group_size)
        return {rank: self._calculate_single_rank_operations(rank) for rank in ranks}

    def _calculate_single_rank_operations(self, rank: int) -> Slots:
        sizes = (self.pp_group_size, self._n_microbatches, self.n_local_stages)
        return order_of_rank(self._family, rank, *sizes)


class ScheduleLoopedBFS(_Family):
    """One stage after the other, all microbatches at once (https://arxiv.org/abs/2211.05953)."""

    _family = "LoopedBFS"

    def __init__(
        self,
        stages: list[_PipelineStageBase],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **more: Any,
    ) -> None:
        more |= {"output_merge_spec": output_merge_spec, "scale_grads": scale_grads}
        more |= {"backward_requires_autograd": backward_requires_autograd}
        super().__init__(stages, n_microbatches, loss_fn, defer_pp_recv=defer_pp_recv, **more)


class ScheduleInterleaved1F1B(_Family):
    """1F1B over several stages per rank (https://arxiv.org/abs/2104.04473)."""

    _family = "Interleaved1F1B"


class ScheduleInterleavedZeroBubble(_Family):
    """Interleaved 1F1B with weight work in its gaps (https://arxiv.org/abs/2401.10241)."""

    _family = "InterleavedZeroBubble"
    _is_split = True

    def _build_order(self) -> Order:
        self.pipeline_order = super()._build_order()
        return self._add_bubbles_to_actions(self.n_local_stages * self.pp_group_size)

    def _add_bubbles_to_actions(self, num_stages_global: int) -> Order:
        return add_bubbles(self.pipeline_order, num_stages_global)


class ScheduleZBVZeroBubble(_Family):
    """The zero-bubble V: two stages per rank (https://arxiv.org/abs/2401.10241, section 6)."""

    _family = "ZBV"
    _is_split = _is_v = True


class ScheduleDualPipeV(_Family):
    """The V with overlapped forwards and backwards (https://arxiv.org/abs/2412.19437)."""

    _family = "DualPipeV"
    _is_split = _is_v = True


def _check_torch_compile_compatibility(
    stages: Sequence[_PipelineStageBase], schedule_name: str
) -> None:
    # A stand-in has no module.
    held: list[object] = [stage.submod for stage in stages]
    modules = [one for one in held if isinstance(one, torch.nn.Module)]
    if any(is_compiler_wrapper(part) for module in modules for part in module.modules()):
        raise PipelineError(
            f"{schedule_name} splits backwards, which a module compiled by torch.compile does in "
            "one piece; use a schedule with whole backwards, such as Interleaved1F1B"
        )


_CLASSES: tuple[type[Any], ...] = (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleInterleavedZeroBubble,
    PipelineScheduleSingle,
    PipelineScheduleMulti,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
)


def get_schedule_class(schedule_name: str) -> type[Any]:
    """Return the class of a schedule by its name, in upper or lower case."""
    names = {known.__name__.removeprefix("Schedule"): known for known in _CLASSES}
    for name, known in names.items():
        if name.lower() == schedule_name.lower():
            return known
    text = f"not a schedule: {schedule_name!r} (expected one of {', '.join(names)})"
    raise ScheduleNameError(text)
