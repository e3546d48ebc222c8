"""What all schedules do around their actions: split a batch, prepare stages, losses, outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from penstock.alive.timeouts import DEFAULT_TIMEOUTS
from penstock.dropin.classes.checks import check_counts, check_rows, count_rows
from penstock.dropin.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.dropin.run.runner import StepRunner
from penstock.dropin.run.session import Lowered
from penstock.dropin.run.step_actions import _PipelineContext
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.dropin.stages.kinds import PipelineStage, _PipelineStage
from penstock.dropin.stages.replaced import find_replaced
from penstock.dropin.stages.values import put_in_place
from penstock.errors import BatchError, PipelineError
from penstock.torch_private import get_default_group
from penstock.training.step_schedules import Receives, receives_for

__all__ = ["_TARGET_CHUNK_SPEC", "_PipelineSchedule"]

# Targets are split by rows.
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)


class _PipelineSchedule(ABC):
    """A schedule bound to the stages of this rank.

    `timeouts` says how long the ranks wait for one that does not answer. It is read in the first
    step.
    """

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
        self._runner = StepRunner()
        self._is_inside = False
        self._p2p_done = False
        self._flags = [f"_{self._held}_{way}_initialized" for way in ("forward", "backward")]
        for flag in self._flags:
            setattr(self, flag, False)

    # ------------------------------------------------------------------ what users call

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch, or on microbatches; return outputs on the last rank.

        Only the first stage takes `args`, only the last one `target`; `kwargs` are each stage's
        own. `losses` is filled on the rank of the last stage, one per microbatch.
        """
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        with self._call():
            self._check_grad_mode()
            if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
                arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
                target_mbs = None if target is None else self._split_target(target)
            elif args or kwargs or target is not None:
                raise BatchError(
                    "a step takes a whole batch or microbatches, not both; leave out arg_mbs, "
                    "kwarg_mbs and target_mbs, or everything else"
                )
            # A subclass may leave out what it does not use.
            extra: Any = {} if loss_kwargs is None else {"loss_kwargs": loss_kwargs}
            parts = (arg_mbs, kwarg_mbs, target_mbs)
            self._step_microbatches(*parts, losses, return_outputs, **extra)
            for stage in self._stages:
                if stage.is_last and return_outputs:
                    return self._merge_outputs(stage.output_chunks)
        return None

    def eval(
        self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any
    ) -> Any:
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
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run one step on microbatches."""
        with self._call():
            args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            target = None if target_mbs is None else target_mbs[0]
            prepare = getattr(self, f"_initialize_{self._held}")
            prepare(args[0], kwargs[0], target, loss_kwargs)
            if real := self._find_real():
                is_first = any(stage.is_first for stage in real)
                self._runner.run(
                    real,
                    _PipelineContext(self, args, kwargs, target_mbs, losses),
                    count_rows(args, self._args_chunk_spec) if is_first else None,
                    has_backward=self._has_backward,
                    return_outputs=return_outputs,
                    loss_kwargs=loss_kwargs,
                )
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
            with self._runner.call(self._find_lowered, real, self.timeouts, is_guarded=is_guarded):
                yield
        finally:
            self._is_inside = False
            self._internal_losses.clear()

    def _find_real(self) -> list[_PipelineStageBase]:
        """Return the stages that run; tests may hand in others."""
        return [s for s in self._stages if isinstance(s, PipelineStage | _PipelineStage)]

    def _check_grad_mode(self) -> None:
        if self._has_backward and not torch.is_grad_enabled():
            raise PipelineError(
                "step() runs backwards, but gradients are disabled here (torch.no_grad); call "
                "eval() to run forward only"
            )

    # ------------------------------------------------------------------ a batch, and its parts

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return a batch as microbatches; ranks that are given nothing have empty ones."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        split = find_replaced(
            "schedules", "split_args_kwargs_into_chunks", split_args_kwargs_into_chunks
        )
        return split(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _split_target(self, target: Any) -> list[Any]:
        if isinstance(target, torch.Tensor):
            split = find_replaced("schedules", "_split_tensor", _split_tensor)
            return list(split(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
        chunks, _ = split_args_kwargs_into_chunks((target,), None, self._n_microbatches)
        return [chunk for (chunk,) in chunks]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """Return the outputs of all microbatches together."""
        merge = find_replaced("schedules", "merge_chunks", merge_chunks)
        return merge(output_chunks, self._output_merge_spec)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Refuse what is not one item per microbatch."""
        given = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        check_counts(given, losses, self._n_microbatches)
        args = [()] * self._n_microbatches if arg_mbs is None else arg_mbs
        kwargs = [{}] * self._n_microbatches if kwarg_mbs is None else kwarg_mbs
        return args, kwargs

    # ------------------------------------------------------------------ losses

    def _compute_loss(
        self, output: Any, target: Any, loss_kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        assert self._loss_fn is not None, "a loss is asked for where there is a function for it"
        return self._loss_fn(output, target, **(loss_kwargs or {}))

    def _maybe_compute_loss(
        self,
        stage: Any,
        output: Any,
        target_mbs: Sequence[Any] | None,
        mb_index: int,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Compute the loss of a microbatch, if this is the last stage and there is one."""
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None:
            if self._has_backward:
                raise BatchError("the rank of the last stage got no target; pass step(target=...)")
            return
        if not self._internal_losses:
            check_rows(self._runner.rows, target_mbs)
        loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
        put_in_place(self._internal_losses, mb_index, loss)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        """Return the loss of a microbatch on the last stage, for its backward."""
        if not stage.is_last or self._loss_fn is None or not self._internal_losses:
            return None
        losses = self._internal_losses
        if not 0 <= mb_index < len(losses) or losses[mb_index] is None:
            have = [number for number, loss in enumerate(losses) if loss is not None]
            raise PipelineError(
                f"the loss of microbatch {mb_index} is missing; there are those of {have}"
            )
        loss: torch.Tensor = losses[mb_index]
        return loss

    def _update_losses(self, stages: Any, losses: list[Any] | None) -> None:
        """Give the losses of a step to the caller, and let go of them."""
        held = stages if isinstance(stages, list) else [stages]
        if losses is not None and any(stage.is_last for stage in held):
            found = self._internal_losses
            if len(found) != self._n_microbatches and (found or self._has_backward):
                raise PipelineError(
                    f"Expecting {self._n_microbatches} losses but got {len(found)}"
                )
            losses[:] = found
        self._internal_losses.clear()

    # ------------------------------------------------------------------ stages

    def _initialize_stages(
        self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: dict[str, Any] | None = None
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
        loss_kwargs: dict[str, Any] | None = None,
    ) -> tuple[bool, bool]:
        """Prepare the stages for the first step, and for the first one of another mode."""
        mode = self._has_backward
        if not (fwd_initialized and bwd_initialized == mode):
            self._warmup_p2p(stages, mode, self._p2p_done)
            count, passed = self._n_microbatches, args
            for stage in stages:
                own = args if stage.is_first else passed
                passed = stage._prepare_forward_infra(count, own, kwargs, has_backward=mode)
            passed = None
            for stage in reversed(stages if mode else []):
                passed = stage._prepare_backward_infra(
                    count, self._loss_fn, target, passed, loss_kwargs
                )
        return True, mode

    def _warmup_p2p(
        self, stages: list[_PipelineStageBase], has_backward: bool, p2p_done: bool
    ) -> None:
        """Do nothing but note it: the ranks are connected before their first step."""
        del stages, has_backward, p2p_done
        self._p2p_done = True
