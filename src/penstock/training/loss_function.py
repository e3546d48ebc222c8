"""The user's loss function: of output and target, or of the output alone."""

import inspect
from typing import Any

import torch

from penstock.step.step_data import LossFunction

__all__ = ["takes_target", "with_target"]


def takes_target(loss: LossFunction) -> bool:
    """Return whether a loss function takes a target; one that takes a single value does not.

    >>> takes_target(lambda output: output.loss)
    False
    >>> takes_target(torch.nn.functional.mse_loss)
    True
    """
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):
        return True
    by_position = [p.kind for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    return by_position not in (
        [inspect.Parameter.POSITIONAL_ONLY],
        [inspect.Parameter.POSITIONAL_OR_KEYWORD],
    )


def with_target(loss: LossFunction) -> LossFunction:
    """Return the loss as a function of output and target."""
    if takes_target(loss):
        return loss

    def of_output(output: Any, _target: Any) -> torch.Tensor | None:
        return loss(output)

    return of_output
