"""What counts as a loss: one real number, in training with a graph."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.parallel.dtensor import as_whole
from penstock.torch_private import tree_leaves

__all__ = ["require_graph", "require_number"]

# What nearly every loss has.
_USUAL_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def require_number(loss: object, name: str = "the loss") -> torch.Tensor:
    """Return a loss as a tensor without dimensions, or raise if it is not one real number.

    >>> require_number(torch.tensor([2.0]))
    tensor(2.)
    """
    # Every microbatch comes here, and most losses are plainly right.
    if (
        type(loss) is torch.Tensor
        and loss.dtype in _USUAL_DTYPES
        and not loss.dim()
        and loss.layout is torch.strided
    ):
        return loss
    advice = _find_mistake(loss)
    if advice is not None or not isinstance(loss, torch.Tensor):
        raise PipelineError(f"{name} must be one real number (got {_describe(loss)}); {advice}")
    whole = as_whole(loss)
    return whole.reshape(()) if whole.dim() else whole


def require_graph(loss: torch.Tensor, output: object, module: nn.Module) -> None:
    """Raise if a loss has no graph; `output` is what `module`, the last stage, returned."""
    if loss.requires_grad:
        return
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    leaves = tree_leaves(output)
    if is_trained or any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
        advice = (
            "compute it from the output of the model, without detach, .data, .item or no_grad on "
            "the way"
        )
    else:
        advice = (
            "no parameter of the last stage is trainable, and what the stage receives requires no "
            "gradient: unfreeze a parameter that the loss depends on, or call evaluate"
        )
    raise PipelineError(
        f"the loss of a training step must have a graph (got {_describe(loss)}); {advice}"
    )


def _find_mistake(loss: object) -> str | None:
    """Return advice on what to return instead, if this is not one real number."""
    match loss:
        case torch.Tensor():
            return _find_mistake_in_tensor(loss)
        case None:
            return (
                "return the loss from the loss function (a model that computes its own loss needs "
                "its labels)"
            )
        case bool() | int() | float() | complex():
            return "return the tensor itself, without .item() or float()"
        case Mapping() if "loss" in loss:
            return "return its 'loss', as loss=penstock.find_loss does"
        case nn.Module() | type():
            return "return what it computes"
        case _ if hasattr(loss, "loss"):
            return "return its .loss, as loss=penstock.find_loss does"
        case tuple() | list() | Mapping():
            return "return the sum of those that are to be trained, as one tensor"
        case _:
            return "return a tensor that is computed from the output of the model"


def _find_mistake_in_tensor(loss: torch.Tensor) -> str | None:
    if loss.is_complex():
        return "return its real part or its absolute value"
    if not loss.is_floating_point():
        return "return a floating point tensor that is computed from the output of the model"
    if loss.layout is not torch.strided:
        return "return it as a dense tensor: loss.to_dense().sum()"
    if loss.numel() != 1:
        return "return loss.mean(), or loss.sum() with Pipeline(reduction='sum')"
    return None


def _describe(value: Any) -> str:
    kind = type(value).__name__
    match value:
        case torch.Tensor():
            return (
                f"a {kind} of shape {tuple(value.shape)}, {value.dtype}, "
                f"requires_grad={value.requires_grad}"
            )
        case None:
            return "None"
        case bool() | int() | float() | complex():
            return f"the {kind} {value}"
        case Mapping():
            return f"a {kind} with {', '.join(map(str, value)) or 'nothing in it'}"
        case tuple() | list():
            return f"a {kind} of {len(value)}"
        case _:
            return f"a {kind}"
