"""Calls of a model that run its pipeline, so that a training loop stays as it was written.

    loss = model(**batch).loss     runs the batch forward and backward, and sets gradients aside
    (loss / 2).backward()          adds half of these to what `.grad` holds

The loss is an ordinary tensor of autograd: whatever is made of it, gradients are exact, and a loss
that is never differentiated changes nothing. While gradients are off, a call evaluates.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError, PipelineError
from penstock.integrations.layout import Layout, PipelineConfig, build_pipeline
from penstock.integrations.optimizers import Places, keep_own_parameters, names_of
from penstock.integrations.outputs import share_outputs as share
from penstock.integrations.processes import choose_seed, start_alike
from penstock.integrations.replicas import Replicas
from penstock.loss.reduction import Reduction
from penstock.splitting.output_loss import find_loss
from penstock.step.step_data import LossFunction
from penstock.training.batch.batch import unwrap
from penstock.training.pipeline import Pipeline

__all__ = ["CallOutput", "PipelineCalls", "train_by_calls"]


class CallOutput:
    """The loss of a call, and the model's outputs where they are shared."""

    __slots__ = ("_outputs", "loss")

    def __init__(self, loss: torch.Tensor, outputs: Any) -> None:
        self.loss = loss
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._shared(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.loss if key in ("loss", 0) else self._shared()[key]

    def _shared(self) -> Any:
        if self._outputs is None:
            raise PipelineError(
                "a call has its loss only, because outputs stay on the rank that computes them; "
                "evaluate under torch.no_grad() and give share_outputs=True"
            )
        return self._outputs


def train_by_calls(
    model: nn.Module,
    config: PipelineConfig,
    layout: Layout,
    device: torch.device,
    *,
    loss: LossFunction = find_loss,
    reduction: Reduction = "auto",
    seed: int | None = None,
    share_outputs: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> "PipelineCalls":
    """Build the pipeline of a model, and have it run the model's calls.

    Every process calls this. Each call of the model is inside of `around()`.
    """
    names = names_of(model)
    start_alike()
    seed = choose_seed(seed)
    pipeline = build_pipeline(model, config, layout, device, reduction, seed, loss=loss)
    calls = PipelineCalls(
        model,
        pipeline,
        layout,
        names,
        around,
        shares=share_outputs,
        needs_target=loss is not find_loss,
    )
    # An instance's attribute goes before its class's method.
    vars(model)["forward"] = calls.run
    return calls


class PipelineCalls:
    """The calls of a model, which are run by a pipeline until `remove`."""

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        layout: Layout,
        names: Mapping[int, str],
        around: Callable[[], AbstractContextManager[Any]],
        *,
        shares: bool,
        needs_target: bool,
    ) -> None:
        self.model = model
        self.pipeline = pipeline
        self._layout, self._names, self._around = layout, names, around
        self._shares, self._needs_target = shares, needs_target
        self._replicas = Replicas(layout, pipeline)
        self._own = tuple(pipeline.parameters())
        self._twins = _find_twins(model, pipeline)

    def remove(self) -> None:
        """Let the model run its own forward again, and close the pipeline."""
        vars(self.model).pop("forward", None)
        self.pipeline.close()

    def keep_own_parameters(self, optimizer: torch.optim.Optimizer) -> Places:
        """Leave an optimizer of the whole model the parameters that this process trains."""
        names = {**self._names, **names_of(self.model)}
        return keep_own_parameters(optimizer, self.pipeline, names)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch: what is called in the place of the model's forward."""
        self._check_target(kwargs)
        for module, original in self._twins:
            # Stages have copies of what contains layers; a part may be in another mode.
            module.training = original.training
        with self._around():
            return (self._train if torch.is_grad_enabled() else self._evaluate)(args, kwargs)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallOutput:
        self._replicas.gather("a call of the model")
        before = [parameter.grad for parameter in self._own]
        # Layers draw from generators of their own, so that all ranks keep the same order of data.
        state = torch.get_rng_state()
        for parameter in self._own:
            parameter.grad = None
        try:
            result = self.pipeline.step(*args, **kwargs)
            made = [(p, p.grad) for p in self._own if p.grad is not None]
        finally:
            torch.set_rng_state(state)
            for parameter, gradient in zip(self._own, before, strict=True):
                parameter.grad = gradient
        value = torch.tensor(result.loss, dtype=self._dtype(), device=self.pipeline.device)
        return CallOutput(_differentiable(value, _Aside(made, self._replicas)), None)

    def _check_target(self, kwargs: Mapping[str, Any]) -> None:
        has_target = kwargs.get("target") is not None
        if self._needs_target and not has_target and torch.is_grad_enabled():
            raise ArgumentError(
                "a call that trains must have the target of the loss function, which is called "
                f"where the last stage is (got the keywords {sorted(kwargs)}); call the model "
                "with target=, and take .loss of what it returns"
            )
        if has_target and not self._needs_target:
            raise ArgumentError(
                "a call with target= needs a loss function to give it to (got none, so that the "
                "model must return its loss); give loss= where you gave the PipelineConfig"
            )

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = _count_rows(args, kwargs)
        microbatches = self.pipeline.schedule.microbatches
        # What a step keeps must be usable in training, which inference tensors are not.
        with torch.inference_mode(False), torch.no_grad():
            result = self.pipeline.evaluate(
                *args,
                **kwargs,
                microbatches=min(microbatches, rows) if rows else None,
                return_outputs=self._shares,
            )
        outputs = None
        if self._shares:
            outputs = share(self.pipeline, self._layout, lambda: result.outputs)
        if result.loss is None and outputs is not None:
            return outputs
        if result.loss is None:
            raise PipelineError(
                "a call without labels has no loss to return; give share_outputs=True to get what "
                "the model returns"
            )
        value = torch.tensor(result.loss, dtype=self._dtype(), device=self.pipeline.device)
        return CallOutput(value, outputs)

    def _dtype(self) -> torch.dtype:
        is_double = any(parameter.dtype is torch.float64 for parameter in self._own[:1])
        return torch.float64 if is_double else torch.float32


def _find_twins(model: nn.Module, pipeline: Pipeline) -> list[tuple[nn.Module, nn.Module]]:
    """Return the modules of the stages here that are copies, and what in the model they are of."""
    originals = dict(model.named_modules())
    found: list[tuple[nn.Module, nn.Module]] = []
    for stage in pipeline.modules.values():
        inner = unwrap(stage)
        found += [(stage, model)] if inner is not stage else []
        for name, module in inner.named_modules():
            original = originals.get(name, model)
            if module is not original:
                found.append((module, original))
    return found


class _Aside:
    """Gradients of one call that wait for the backward of its loss.

    They are means over replicas already, so all of these must scale them alike.
    """

    def __init__(self, made: list[tuple[nn.Parameter, torch.Tensor]], replicas: Replicas) -> None:
        self._made: list[tuple[nn.Parameter, torch.Tensor]] | None = made
        self._replicas = replicas

    def add(self, scale: float) -> None:
        """Add the gradients, times the gradient of the loss, to those of the parameters."""
        if self._made is None:
            raise PipelineError("a loss is differentiated once; call the model again")
        made, self._made = self._made, None
        scales = self._replicas.gather("a backward", scale)
        if len(set(map(str, scales))) > 1:
            raise PipelineError(
                "replicas must multiply their losses by the same factor, since gradients are "
                f"means over them when a backward begins (got {' and '.join(map(str, scales))}); "
                "give what the loss is a mean over as reduction=, or let replicas have as much "
                "of it each"
            )
        with torch.no_grad():
            for parameter, gradient in made:
                if scale != 1:
                    gradient.mul_(scale)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.add_(gradient)


class _Loss(torch.autograd.Function):
    """The loss of a call, whose backward adds the gradients that wait for it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, aside: _Aside
    ) -> torch.Tensor:
        """Return the loss."""
        ctx.aside = aside
        return value + 0 * anchor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Pass the gradient of the loss on to the parameters."""
        ctx.aside.add(float(gradients[0]))
        return None, None, None


def _differentiable(value: torch.Tensor, aside: _Aside) -> torch.Tensor:
    anchor = torch.zeros_like(value, requires_grad=True)
    loss: torch.Tensor = _Loss.apply(anchor, value, aside)  # type: ignore[no-untyped-call]  # untyped upstream
    return loss


def _count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rows of a batch, by its first tensor that has some."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return len(value)
    return 0
