"""Clipping by the norm of the whole model, of which each process has a part."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from penstock.errors import PipelineError
from penstock.training.pipeline import Pipeline

__all__ = ["clip_by_pipeline"]


def clip_by_pipeline(plugin: Precision, module: pl.LightningModule, pipeline: Pipeline) -> None:
    """Have gradients clipped by the pipeline, and refuse a module that does it by itself."""
    vars(plugin)["clip_grad_by_norm"] = partial(_clip, pipeline)
    vars(module).pop("configure_gradient_clipping", None)
    if is_overridden("configure_gradient_clipping", module):
        vars(module)["configure_gradient_clipping"] = _Checked(plugin, module, pipeline)


def _clip(pipeline: Pipeline, optimizer: Any, clip_val: float) -> None:
    del optimizer
    pipeline.clip_grad_norm_(float(clip_val))


class _Checked:
    """A module's own `configure_gradient_clipping`, which must clip by `self.clip_gradients`."""

    def __init__(self, plugin: Precision, module: pl.LightningModule, pipeline: Pipeline) -> None:
        self._method = module.configure_gradient_clipping
        self._pipeline, self._is_clipped = pipeline, False
        clip = type(plugin).clip_gradients.__get__(plugin)

        def clip_and_note(*args: Any, **kwargs: Any) -> None:
            self._is_clipped = True
            clip(*args, **kwargs)

        vars(plugin)["clip_gradients"] = clip_and_note

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._is_clipped, before = False, self._versions()
        self._method(*args, **kwargs)
        if not self._is_clipped and self._versions() != before:
            raise PipelineError(
                "configure_gradient_clipping has changed the gradients of this process by "
                "themselves, which are a part of the model's; call self.clip_gradients in it"
            )

    def _versions(self) -> list[int]:
        return [p.grad._version for p in self._pipeline.parameters() if p.grad is not None]
