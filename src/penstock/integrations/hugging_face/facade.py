"""A pipeline as the module that a Trainer handles: its parameters, modes and gradients."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from torch import nn

from penstock.errors import PipelineError
from penstock.training.pipeline import Pipeline

__all__ = ["PipelineModule", "refuse_calls"]


def refuse_calls(model: nn.Module) -> None:
    """Have calls of a model raise, of which this process trains a part only."""
    # Stages are copies of the model, which share its hooks unless the table is copied.
    model._forward_pre_hooks = OrderedDict(model._forward_pre_hooks)
    model.register_forward_pre_hook(_refuse)


def _refuse(*_: object) -> NoReturn:
    raise PipelineError(
        "a model that is split over processes cannot be called by one of them, which has trained "
        "a part of it; evaluate and predict with the PipelineTrainer, generate with "
        "penstock.integrations.hugging_face.generation, or load what save_model has saved"
    )


class PipelineModule(nn.Module):
    """What this process has of a model that is trained by a pipeline; it cannot be called."""

    pipeline: Pipeline
    config: Any

    def __init__(self, pipeline: Pipeline, config: Any) -> None:
        super().__init__()
        vars(self).update(pipeline=pipeline, config=config)

    def forward(self, *_: object, **__: object) -> Any:
        """Refuse, because one process has only a part of the model."""
        _refuse()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters by the model's own names."""
        del recurse, remove_duplicate
        return ((f"{prefix}{name}", p) for name, p in self.pipeline.named_parameters())

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Return this process's part of the state."""
        return self.pipeline.state_dict()

    def train(self, mode: bool = True) -> Self:
        """Set this process's stages to training or evaluation mode."""
        self.pipeline.train(mode)
        self.training = mode
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this process's parameters."""
        self.pipeline.zero_grad(set_to_none)
