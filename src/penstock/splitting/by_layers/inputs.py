"""What the inputs of a model are called."""

import inspect

from torch import nn

__all__ = ["parameter_names"]


def parameter_names(model: nn.Module) -> list[str]:
    """The names of what a model takes by position, so that an input is one however it is given."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
