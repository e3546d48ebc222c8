"""What all schedules do around their actions: split a batch, prepare stages, losses, outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import torch

from penstock.alive.timeouts import DEFAULT_TIMEOUTS
from penstock.dropin.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.dropin.run.runner import ScheduleRunner
from penstock.dropin.run.session import Lowered
from penstock.dropin.run.step_actions import _PipelineContext
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.kinds import PipelineStage, _PipelineStage
from penstock.dropin.stages.replaced import find_replaced
from penstock.dropin.stages.values import Named, put_in_place
from penstock.errors import BatchError, PipelineError
from penstock.step.microbatches import Along, count_rows
from penstock.torch_private import get_default_group, tree_flatten
from penstock.training.step_schedules import Receives, receives_for

__all__ = ["_TARGET_CHUNK_SPEC", "_PipelineSchedule"]

# One item per microbatch.
Parts: TypeAlias = list[Any] | None

# Targets are split by rows.
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)


class LossesTypeError(BatchError, TypeError):
    """Microbatches or losses come in a list; also a `TypeError`, which torch's users expect."""


class _PipelineSchedule(ABC):
    """A schedule bound to the stages of this rank; `timeouts` is read in the first step."""

    # What torch's names of it have for the stages of a rank: `_initialize_stages` and so on.
    _held: ClassVar = "stages"
    _stages: list[_PipelineStageBase]
    _num_stages: int

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        self._n_microbatches, self.scale_grads = n_microbatches, scale_grads
        self._args_chunk_spec, self._kwargs_chunk_spec = args_chunk_spec, kwargs_chunk_spec
        self._output_merge_spec, self._loss_fn = output_merge_spec, loss_fn
        self.timeouts = DEFAULT_TIMEOUTS
        self._has_backward = loss_fn is not None
        self._internal_losses: list[Any] = []
        self._runner = ScheduleRunner()
        self._is_inside = False
        self._p2p_done = False
        self._flags = [f"_{self._held}_{way}_initialized" for way in ("forward", "backward")]
        for flag in self._flags:
            setattr(self, flag, False)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: Parts = None,
        return_outputs: bool = True,
        loss_kwargs: Named = None,
        arg_mbs: Parts = None,
        kwarg_mbs: Parts = None,
        target_mbs: Parts = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch, or on microbatches; return outputs on the last rank."""
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        with self._call():
            self._check_grad_mode()
            if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
                arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
                target_mbs = None if target is None else self._split_target(target)
            elif args or kwargs or target is not None:
                raise BatchError("a step takes a whole batch or microbatches, not both")
            # A subclass may leave out what it does not use.
            extra: Any = {} if loss_kwargs is None else {"loss_kwargs": loss_kwargs}
            parts = (arg_mbs, kwarg_mbs, target_mbs)
            self._step_microbatches(*parts, losses, return_outputs, **extra)
            for stage in self._stages:
                if stage.is_last and return_outputs:
                    return self._merge_outputs(stage.output_chunks)
        return None

    def eval(self, *args: Any, target: Any = None, losses: Parts = None, **kwargs: Any) -> Any:
        """Run a batch forward only; no gradient is computed or changed, and no graph kept."""
        trained = self._has_backward
        self._has_backward = False
        try:
            with torch.no_grad():
                return self.step(*args, target=target, losses=losses, **kwargs)
        finally:
            self._has_backward = trained

    def _step_microbatches(
        self,
        arg_mbs: Parts = None,
        kwarg_mbs: Parts = None,
        target_mbs: Parts = None,
        losses: Parts = None,
        return_outputs: bool = True,
        loss_kwargs: Named = None,
    ) -> None:
        with self._call():
            args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            target = None if target_mbs is None else target_mbs[0]
            prepare = getattr(self, f"_initialize_{self._held}")
            prepare(args[0], kwargs[0], target, loss_kwargs)
            if real := self._find_real():
                is_first = any(stage.is_first for stage in real)
                rows = _count_rows(args, self._args_chunk_spec) if is_first else None
                context = _PipelineContext(self, args, kwargs, target_mbs, losses)
                rest = self._has_backward, return_outputs, loss_kwargs
                self._runner.run(real, context, rows, *rest)
            self._update_losses(self._stages, losses)

    @abstractmethod
    def _find_lowered(self) -> Lowered:
        """Return what the ranks run; the same object as long as that stays the same."""

    @property
    def _receives(self) -> Receives:
        """Where a step starts to receive, as in a pipeline of ours on the same devices."""
        for stage in self._find_real():
            return receives_for(stage.group or get_default_group(), torch.device(stage.device))
        return "early"

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Be around a step, once: what fails on one rank is raised by all."""
        real = self._find_real()
        if self._is_inside or not real:
            yield
            return
        is_prepared = [getattr(self, flag) for flag in self._flags] == [True, self._has_backward]
        is_guarded = not (is_prepared and all(stage._runtime_validate for stage in real))
        self._is_inside = True
        try:
            with self._runner.call(self._find_lowered, real, self.timeouts, is_guarded):
                yield
        finally:
            self._is_inside = False
            self._internal_losses.clear()

    def _find_real(self) -> list[_PipelineStageBase]:
        """Return the stages that run; tests may hand in others."""
        return [s for s in self._stages if isinstance(s, PipelineStage | _PipelineStage)]

    def _check_grad_mode(self) -> None:
        if self._has_backward and not torch.is_grad_enabled():
            raise PipelineError("step() runs backwards; under torch.no_grad, call eval()")

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: Named = None
    ) -> tuple[list[Any], list[Any]]:
        """Return a batch as microbatches; ranks that are given nothing have empty ones."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        specs = self._args_chunk_spec, self._kwargs_chunk_spec
        split = find_replaced("schedules", split_args_kwargs_into_chunks)
        return split(args, kwargs, self._n_microbatches, *specs)

    def _split_target(self, target: Any) -> list[Any]:
        if isinstance(target, torch.Tensor):
            split = find_replaced("schedules", _split_tensor)
            return list(split(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
        chunks, _ = split_args_kwargs_into_chunks((target,), None, self._n_microbatches)
        return [chunk for (chunk,) in chunks]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return find_replaced("schedules", merge_chunks)(output_chunks, self._output_merge_spec)

    def _check_inputs(
        self,
        arg_mbs: Parts = None,
        kwarg_mbs: Parts = None,
        target_mbs: Parts = None,
        losses: Parts = None,
    ) -> tuple[list[Any], list[Any]]:
        count = self._n_microbatches
        given = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        for name, items in {**given, "losses": losses}.items():
            if items is not None and not isinstance(items, list):
                raise LossesTypeError(f"{name} must be a list (got {type(items).__name__})")
        for name, items in given.items():
            if items is not None and len(items) != count:
                text = f"Expecting {count} {name} but got {len(items)}"
                raise BatchError(f"{text}; a batch has at least one row per microbatch")
        return arg_mbs or [()] * count, kwarg_mbs or [{}] * count

    def _compute_loss(self, output: Any, target: Any, loss_kwargs: Named = None) -> torch.Tensor:
        assert self._loss_fn is not None, "a loss is asked for where there is a function for it"
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Parts, mb_index: int, loss_kwargs: Named = None
    ) -> None:
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None:
            if self._has_backward:
                raise BatchError("the rank of the last stage got no target; pass step(target=...)")
            return
        if not self._internal_losses:
            session = self._runner.session
            _check_rows(None if session is None else session.rows, target_mbs)
        loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
        put_in_place(self._internal_losses, mb_index, loss)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        if not stage.is_last or self._loss_fn is None or not self._internal_losses:
            return None
        losses = self._internal_losses
        loss: torch.Tensor | None = losses[mb_index] if 0 <= mb_index < len(losses) else None
        if loss is None:
            have = [number for number, known in enumerate(losses) if known is not None]
            raise PipelineError(
                f"the loss of microbatch {mb_index} is missing; there are those of {have}"
            )
        return loss

    def _update_losses(self, stages: Any, losses: Parts) -> None:
        """Give the losses of a step to the caller, and let go of them."""
        held = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in held):
            found, count = self._internal_losses, self._n_microbatches
            if len(found) != count and (found or self._has_backward):
                raise PipelineError(f"Expecting {count} losses but got {len(found)}")
            losses[:] = found
        self._internal_losses.clear()

    def _initialize_stages(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Named = None
    ) -> None:
        forward, backward = (getattr(self, flag) for flag in self._flags)
        given = (self._stages, args, kwargs, target)
        done = self._initialize_pp_stages(*given, forward, backward, loss_kwargs)
        for flag, is_done in zip(self._flags, done, strict=True):
            setattr(self, flag, is_done)

    def _initialize_pp_stages(
        self,
        stages: list[_PipelineStageBase],
        args: Any,
        kwargs: dict[str, Any] | None,
        target: Any,
        fwd_initialized: bool,
        bwd_initialized: bool,
        loss_kwargs: Named = None,
    ) -> tuple[bool, bool]:
        mode, count, loss_fn = self._has_backward, self._n_microbatches, self._loss_fn
        if not (fwd_initialized and bwd_initialized == mode):
            self._warmup_p2p(stages, mode, self._p2p_done)
            found = args
            for stage in stages:
                own = args if stage.is_first else found
                found = stage._prepare_forward_infra(count, own, kwargs, has_backward=mode)
            found = None
            for stage in reversed(stages if mode else []):
                found = stage._prepare_backward_infra(count, loss_fn, target, found, loss_kwargs)
        return True, mode

    def _warmup_p2p(
        self, stages: list[_PipelineStageBase], has_backward: bool, p2p_done: bool
    ) -> None:
        """Do nothing but note it: the ranks are connected before their first step."""
        del stages, has_backward, p2p_done
        self._p2p_done = True


def _count_rows(arg_mbs: Sequence[Any], spec: tuple[Any, ...] | None) -> int | None:
    """Return how many rows the first tensor that is split has in all microbatches together."""
    specs = None if spec is None else tree_flatten(spec)[0]
    counts = []
    for args in arg_mbs:
        leaves = tree_flatten(tuple(args))[0]
        pairs = zip(leaves, specs or [_TARGET_CHUNK_SPEC] * len(leaves), strict=False)
        split = [(leaf, one.split_dim) for leaf, one in pairs if isinstance(one, TensorChunkSpec)]
        counts.append(count_rows([Along(leaf, dim) for leaf, dim in split]))
    return None if None in counts else sum(count or 0 for count in counts)


def _check_rows(rows: int | None, target_mbs: Sequence[Any]) -> None:
    """Refuse a target whose rows are neither those of the batch nor a multiple of them."""
    if rows is not None and all(isinstance(t, torch.Tensor) and t.dim() > 0 for t in target_mbs):
        found = sum(target.shape[0] for target in target_mbs)
        if found % rows:
            raise BatchError(
                f"the target has {found} rows for a batch of {rows}, so that microbatches of "
                "outputs and targets would not belong together"
            )
