"""The numbers that a run is compared by: gradients, parameters and buffers, by name."""

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import nn

__all__ = ["Numbers", "as_tensor", "look", "name_by_step", "step_of"]

# What a run gave, by step and name; None for a gradient that is not there.
Numbers: TypeAlias = dict[str, torch.Tensor | None]


def look(modules: Iterable[tuple[str, nn.Module]], loss: object) -> Numbers:
    """Gradients, parameters and buffers of modules, as they are now, and of the loss.

    With each module comes the prefix of its names.
    """
    found: Numbers = {}
    for prefix, module in modules:
        for name, parameter in module.named_parameters():
            found[f"parameter {prefix}{name}"] = parameter.detach().clone()
            found[f"gradient {prefix}{name}"] = _gradient(parameter)
        for name, buffer in module.named_buffers():
            found[f"buffer {prefix}{name}"] = buffer.clone()
    if isinstance(loss, nn.Module):
        for name, parameter in loss.named_parameters():
            found[f"gradient loss.{name}"] = _gradient(parameter)
    return found


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    if parameter.grad is None:
        return None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad.clone()


def as_tensor(number: float) -> torch.Tensor:
    """A number as a tensor."""
    return torch.tensor(number, dtype=torch.float64)


def name_by_step(step: int, numbers: Numbers) -> Numbers:
    """The numbers with the step in their names."""
    return {f"step {step}: {name}": value for name, value in numbers.items()}


def step_of(name: str) -> str:
    """The step that `name_by_step` put into a name."""
    return name.partition(":")[0]
