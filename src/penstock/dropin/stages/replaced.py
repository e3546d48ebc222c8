"""What a client has put in the place of a name in one of torch's modules.

Programs replace functions in torch's modules and count on torch to call theirs. Ours are defined
elsewhere, so callers of these functions look here first.
"""

import sys
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.dropin._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

__all__ = ["find_replaced", "is_backward_replaced", "run_by_hand"]

_T = TypeVar("_T")


def find_replaced(module: str, name: str, ours: _T) -> _T:
    """Return what a module under torch's name has under this name; ours, unless it was replaced.

    >>> find_replaced("schedules", "no such name", 3)
    3
    """
    found: _T = getattr(sys.modules.get(f"penstock.dropin.{module}"), name, ours)
    return found


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
