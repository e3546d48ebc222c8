"""Backwards by the functions of torch's module, which a client may have replaced."""

from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.dropin._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.dropin.names.replaced import find_replaced

__all__ = ["is_backward_replaced", "run_by_hand"]


def is_backward_replaced() -> bool:
    """Return whether a client has put a backward of its own into torch's module."""
    ours = (stage_backward, stage_backward_input, stage_backward_weight)
    return any(find_replaced("stage", one.__name__, one) is not one for one in ours)


def run_by_hand(
    module: nn.Module, backward_type: str, values: dict[str, Any]
) -> tuple[tuple[torch.Tensor | None, ...], Any]:
    """Run a backward or a half of it on a graph as it was recorded."""
    find = partial(find_replaced, "stage")
    if backward_type == "weight":
        run: Any = find("stage_backward_weight", stage_backward_weight)
        return run(module.parameters(), values["param_groups"]), None
    given = [values[name] for name in ("stage_output", "output_grads", "input_values")]
    if backward_type == "full":
        run = find("stage_backward", stage_backward)
        return run(*given), None
    run = find("stage_backward_input", stage_backward_input)
    found: tuple[tuple[torch.Tensor | None, ...], Any] = run(*given, module.parameters())
    return found
