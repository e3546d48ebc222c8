"""What a client has put in the place of a name in one of torch's modules.

Programs replace functions in torch's modules and count on torch to call theirs. Ours are defined
elsewhere, so callers of these functions look here first.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from penstock.dropin._backward import stage_backward, stage_backward_input, stage_backward_weight
from penstock.dropin.stages.values import Gradients

__all__ = ["find_replaced", "is_backward_replaced", "run_by_hand"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def find_replaced(module: str, ours: _Function) -> _Function:
    """Return what a module under torch's name has under a function's name: ours, or another."""
    found: _Function = getattr(sys.modules.get(f"penstock.dropin.{module}"), ours.__name__, ours)
    return found


def is_backward_replaced() -> bool:
    """Return whether a client has put a backward of its own into torch's module."""
    halves: list[Callable[..., Any]] = [stage_backward_input, stage_backward_weight]
    return any(find_replaced("stage", one) is not one for one in (stage_backward, *halves))


def run_by_hand(
    module: nn.Module, backward_type: str, values: dict[str, Any]
) -> tuple[Gradients, Any]:
    """Run a backward or a half of it on a graph as it was recorded."""
    if backward_type == "weight":
        finish = find_replaced("stage", stage_backward_weight)
        return finish(module.parameters(), values["param_groups"]), None
    given = values["stage_output"], values["output_grads"], values["input_values"]
    if backward_type == "full":
        return find_replaced("stage", stage_backward)(*given), None
    return find_replaced("stage", stage_backward_input)(*given, module.parameters())
