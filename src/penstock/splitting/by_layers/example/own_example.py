"""The dependencies of a model that says what it takes, as by `dummy_inputs`.

The run takes no memory and hardly any time: it is that of a copy on the meta device.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from logging import getLogger
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.example.called_towers import settle_towers
from penstock.splitting.by_layers.example.dependencies import find_dependencies
from penstock.splitting.by_layers.example.usual_inputs import own_examples
from penstock.splitting.by_layers.example.value_tracker import Dependencies
from penstock.splitting.by_layers.units import find_units
from penstock.splitting.original import unguarded

__all__ = ["find_own_dependencies", "find_own_towers"]

_LOGGER = getLogger(__name__)


def find_own_towers(model: nn.Module, stages: int, found: list[str]) -> list[str]:
    """Return those of the lists of layers that the model's own example runs, in order.

    Without such an example a single list is taken to run; several are refused. So is a model that
    does not run them all on another of its own examples, such as pictures without words.
    """
    lists = settle_towers(model, stages, found, partial(_called, model))
    for dependencies in find_own_dependencies(model, lists):
        called = _lists_called(lists, dependencies)
        if left_out := [path for path in lists if path not in called]:
            inputs = sorted(value.leaf for value in dependencies.inputs)
            raise ModelError(
                f"the model does not run the layers of {left_out[0]!r} on {', '.join(inputs)}, so "
                "that only an example shows what to cut; give one (layers='auto', "
                "example_kwargs={...}), or name the lists that run (layers=[...])"
            )
    return lists


def _called(model: nn.Module, lists: list[str]) -> list[str]:
    dependencies = next(iter(find_own_dependencies(model, lists)), None)
    if dependencies is None and len(lists) == 1:
        return lists
    if dependencies is None:
        known = ", ".join(map(repr, lists))
        raise ModelError(
            f"the model has several lists of layers ({known}), and only an example shows which "
            "of them run, and in which order; give one (layers='auto', example_kwargs={...}), or "
            f"name the lists in the order in which they run (layers=[{known}])"
        )
    return _lists_called(lists, dependencies)


def _lists_called(lists: list[str], dependencies: Dependencies) -> list[str]:
    """Return the list of each layer that was called, in order."""
    calls = [call.path for call in dependencies.calls]
    return [path for call in calls for path in lists if call.startswith(f"{path}.")]


def find_own_dependencies(model: nn.Module, lists: Sequence[str]) -> Iterator[Dependencies]:
    """Yield what a model depends on when it runs on each example of its own, the usual one first.

    An example may not fit the model, as that of a class above it; it is left out then.
    """
    try:
        for example in own_examples(model, _copy_on_meta(model)):
            found = _try(_copy_on_meta(model), lists, example)
            if found is not None:
                yield found
    except Exception as error:  # the model's own code for its example
        _LOGGER.debug("the model cannot say what it takes: %s", error)


def _try(copy: nn.Module, lists: Sequence[str], example: Mapping[str, Any]) -> Dependencies | None:
    try:
        return find_dependencies(copy, find_units(copy, lists), (), example)
    except Exception as error:  # the model's own code on inputs that it may not be made for
        _LOGGER.debug("the model does not run on %s of its own: %s", list(example), error)
        return None


def _copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have no memory."""
    with unguarded(model):
        return deepcopy(
            model, {id(t): _without_memory(t) for t in chain(model.parameters(), model.buffers())}
        )


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
