"""The unsplit model: the stages one after the other, on the whole batch, by plain autograd."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import nn

from penstock.ir.dataflow import Dataflow
from penstock.loss.added import collect_losses
from penstock.tensors.packet import as_arguments
from penstock.tools.verify.case import Case

__all__ = ["GradientError", "find_unreached", "largest_error", "run_unsplit"]

# Gradients that are zero up to rounding are compared with the largest of the model.
_SMALLEST_SCALE = 1e-3


@dataclass(frozen=True, slots=True, order=True)
class GradientError:
    """The parameter with the largest relative error of its gradient, and that error."""

    error: float
    name: str


def run_unsplit(case: Case, dataflow: Dataflow) -> torch.Tensor:
    """Return the loss of the whole batch; `case.stages` are the parts of the model."""
    outputs: dict[int, Any] = {}
    total = torch.zeros((), dtype=torch.float64)
    with collect_losses() as added:
        for stage, part in enumerate(dataflow.parts):
            if dataflow.stream_of_stage[stage]:
                continue
            values = [outputs[producer] for producer in dataflow.producers(stage)]
            outputs[stage] = case.stages[part](*(as_arguments(values) if values else case.args))
            if not dataflow.consumers(stage):
                total = total + case.loss(outputs[stage], case.target)
    return total + sum(added)


def largest_error(
    found: Sequence[tuple[int, nn.Module]], expected: Sequence[nn.Module]
) -> GradientError:
    """Return the largest error of the gradients of these parts of the model.

    A missing gradient counts as zeros. The error is relative to the largest entry of the
    parameter's own gradient, or to a thousandth of the largest of all if that is more.
    """
    gradients = [_gradient(p) for module in expected for p in module.parameters()]
    largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    worst = GradientError(0.0, "")
    for part, module in found:
        pairs = zip(module.named_parameters(), expected[part].parameters(), strict=True)
        for (name, parameter), reference in pairs:
            if not parameter.numel():
                continue
            wanted = _gradient(reference)
            difference = float((_gradient(parameter) - wanted).abs().max())
            scale = max(float(wanted.abs().max()), _SMALLEST_SCALE * largest)
            error = difference / scale if scale else difference
            # NaN is the largest error.
            error = inf if isnan(error) else error
            worst = max(worst, GradientError(error, f"{name} of stage {part}"))
    return worst


def find_unreached(parts: Sequence[nn.Module]) -> list[int]:
    """Return the parts of the model that are trained but get no gradient."""
    trained = [[p for p in module.parameters() if p.requires_grad] for module in parts]
    return [
        part
        for part, parameters in enumerate(trained)
        if parameters and all(parameter.grad is None for parameter in parameters)
    ]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
