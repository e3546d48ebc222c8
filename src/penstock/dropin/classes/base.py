"""What all schedules do around their actions: split a batch, learn shapes, losses, outputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.dropin._action_runner import ActionRunner, StepBatch
from penstock.dropin._announcer import Announcer
from penstock.dropin.microbatch import (
    TensorChunkSpec,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from penstock.dropin.names.actions import _Action
from penstock.dropin.stage import PipelineStage, _PipelineStage
from penstock.dropin.stages.base import _PipelineStageBase
from penstock.errors import BatchError, PipelineError

__all__ = [
    "_TARGET_CHUNK_SPEC",
    "_CustomFunctionProtocol",
    "_PipelineContext",
    "_PipelineSchedule",
]

# Targets are split by rows.
_TARGET_CHUNK_SPEC = TensorChunkSpec(0)


class LossesTypeError(BatchError, TypeError):
    """Microbatches or losses come in a list; also a `TypeError`, which torch's users expect."""


@dataclass
class _PipelineContext:
    """What a custom function is given besides its action."""

    schedule_ref: "_PipelineSchedule"
    arg_mbs: list[tuple[Any, ...]] | None = None
    kwarg_mbs: list[dict[str, Any]] | None = None
    target_mbs: list[Any] | None = None
    losses: list[Any] | None = None


class _CustomFunctionProtocol(Protocol):
    """Does in the user's way what a kind of action does."""

    def __call__(self, action: _Action, ctx: _PipelineContext) -> None:
        """Do it."""


class _PipelineSchedule(ABC):
    """A schedule bound to the stages of this rank."""

    def __init__(
        self,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._args_chunk_spec = args_chunk_spec
        self._kwargs_chunk_spec = kwargs_chunk_spec
        self._output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self._has_backward = loss_fn is not None
        self._internal_losses: list[Any] = []
        self._runner = ActionRunner()
        self._announcer = Announcer()

    # ------------------------------------------------------------------ what users call

    @abstractmethod
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step on a whole batch; the outputs, on the rank of the last stage.

        Only the first stage takes `args`, only the last one `target`; `kwargs` are each stage's
        own. `losses` is filled on the rank of the last stage, one per microbatch.
        """

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

    @abstractmethod
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

    def _run_step(
        self,
        stages: Sequence[_PipelineStageBase],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Split a batch, run its microbatches, and merge their outputs."""
        for stage in stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        arg_mbs, kwarg_mbs = self._split_inputs(args, kwargs)
        target_mbs = None if target is None else self._split_target(target)
        extra = {} if loss_kwargs is None else {"loss_kwargs": loss_kwargs}
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **extra)
        for stage in stages:
            if stage.is_last and return_outputs:
                return self._merge_outputs(stage.output_chunks)
        return None

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
        """A batch as microbatches; ranks that are given nothing have empty ones."""
        if not args and not kwargs:
            return [()] * self._n_microbatches, [{}] * self._n_microbatches
        return split_args_kwargs_into_chunks(
            args, kwargs, self._n_microbatches, self._args_chunk_spec, self._kwargs_chunk_spec
        )

    def _split_target(self, target: Any) -> list[Any]:
        if isinstance(target, torch.Tensor):
            return list(_split_tensor(target, _TARGET_CHUNK_SPEC, self._n_microbatches))
        chunks, _ = split_args_kwargs_into_chunks((target,), None, self._n_microbatches)
        return [chunk for (chunk,) in chunks]

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        """The outputs of all microbatches together."""
        return merge_chunks(output_chunks, self._output_merge_spec)

    def _check_inputs(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Refuse what is not one item per microbatch; note what this step looks like."""
        for name, items in (("arg_mbs", arg_mbs), ("kwarg_mbs", kwarg_mbs)):
            self._check_count(name, items)
        self._check_count("target_mbs", target_mbs)
        if losses is not None and not isinstance(losses, list):
            raise LossesTypeError(f"losses must be a list (got {type(losses).__name__})")
        args = [()] * self._n_microbatches if arg_mbs is None else arg_mbs
        kwargs = [{}] * self._n_microbatches if kwarg_mbs is None else kwarg_mbs
        self._announcer.look_at(args, kwargs, self._args_chunk_spec)
        return args, kwargs

    def _check_count(self, name: str, items: list[Any] | None) -> None:
        if items is None:
            return
        if not isinstance(items, list):
            raise LossesTypeError(f"{name} must be a list (got {type(items).__name__})")
        if len(items) != self._n_microbatches:
            raise BatchError(
                f"Expecting {self._n_microbatches} {name} but got {len(items)}; a batch has at "
                "least one row per microbatch"
            )

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
        """The loss of a microbatch, if this is the last stage and there is a loss to compute."""
        if not stage.is_last or self._loss_fn is None:
            return
        if target_mbs is None:
            if self._has_backward:
                raise BatchError("the rank of the last stage got no target; pass step(target=...)")
            return
        if not self._internal_losses:
            self._check_rows(stage, target_mbs)
        loss = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)
        self._internal_losses.extend([None] * (mb_index + 1 - len(self._internal_losses)))
        self._internal_losses[mb_index] = loss

    def _check_rows(self, stage: Any, target_mbs: Sequence[Any]) -> None:
        """Refuse a target that has not as many rows as the batch, or a multiple of them."""
        rows = self._announcer.find_rows(stage)
        are_split = all(isinstance(t, torch.Tensor) and t.dim() > 0 for t in target_mbs)
        if rows is not None and are_split:
            found = sum(target.shape[0] for target in target_mbs)
            if found % rows:
                raise BatchError(
                    f"the target has {found} rows for a batch of {rows}, so that microbatches of "
                    "outputs and targets would not belong together"
                )

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        """The loss of a microbatch on the last stage, for its backward."""
        if not stage.is_last or self._loss_fn is None or not self._internal_losses:
            return None
        is_there = 0 <= mb_index < len(self._internal_losses)
        if not is_there or self._internal_losses[mb_index] is None:
            have = [n for n, loss in enumerate(self._internal_losses) if loss is not None]
            raise PipelineError(
                f"the loss of microbatch {mb_index} is not there; there are those of {have}"
            )
        loss: torch.Tensor = self._internal_losses[mb_index]
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

    # ------------------------------------------------------------------ a step begins and ends

    def _initialize_pp_stages(
        self,
        stages: Sequence[_PipelineStageBase],
        args: Any,
        kwargs: dict[str, Any] | None,
        target: Any,
        fwd_initialized: bool,
        bwd_initialized: bool,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> tuple[bool, bool]:
        """Prepare the stages for the first step, and for the first one of another mode."""
        is_known = fwd_initialized and bwd_initialized == self._has_backward
        if not is_known:
            given = args
            for stage in stages:
                given = stage._prepare_forward_infra(
                    self._n_microbatches,
                    args if stage.is_first else given,
                    kwargs,
                    has_backward=self._has_backward,
                )
            grads = None
            for stage in reversed(stages) if self._has_backward else ():
                grads = stage._prepare_backward_infra(
                    self._n_microbatches,
                    loss_fn=self._loss_fn,
                    target=target,
                    received_grad_meta=grads,
                    loss_kwargs=loss_kwargs,
                )
        self._announcer.announce(
            _real_stages(stages), self._n_microbatches, self._has_backward, is_known=is_known
        )
        return True, self._has_backward

    def _run_actions(
        self,
        stages: Sequence[_PipelineStageBase],
        actions: Iterable[_Action | None],
        batch: StepBatch,
        *,
        context: _PipelineContext,
        sends_may_wait: bool,
    ) -> None:
        """Run this rank's actions, with what must be done before and after."""
        real = _real_stages(stages)
        factor = self._n_microbatches if self.scale_grads else 1
        for stage in real if self._has_backward else ():
            stage.begin_training(factor)
        try:
            self._runner.run(
                self, stages, list(actions), batch, context=context, sends_may_wait=sends_may_wait
            )
        except BaseException:
            self._internal_losses.clear()
            self._announcer.abandon_step()
            raise
        finally:
            for stage in real:
                stage.end_training()
        self._announcer.end_step()


def _real_stages(stages: Sequence[Any]) -> list[PipelineStage | _PipelineStage]:
    """The stages that run; tests may hand in others."""
    return [stage for stage in stages if isinstance(stage, PipelineStage | _PipelineStage)]
