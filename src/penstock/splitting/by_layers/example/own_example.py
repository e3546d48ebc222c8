"""The dependencies of a model that says what it takes, as by `dummy_inputs`.

The run takes no memory and hardly any time: it is that of a copy on the meta device.
"""

from collections.abc import Mapping, Sequence
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
from penstock.splitting.by_layers.example.value_tracker import Dependencies
from penstock.splitting.by_layers.records.call_records import parameter_names
from penstock.splitting.by_layers.units import find_units
from penstock.splitting.original import unguarded

__all__ = ["find_own_dependencies", "find_own_towers"]

_LOGGER = getLogger(__name__)


def find_own_towers(model: nn.Module, stages: int, found: list[str]) -> list[str]:
    """Return those of several lists of layers that the model's own example runs, in order."""
    return settle_towers(model, stages, found, partial(_called, model))


def _called(model: nn.Module, lists: list[str]) -> list[str]:
    dependencies = find_own_dependencies(model, lists)
    if dependencies is None:
        known = ", ".join(map(repr, lists))
        raise ModelError(
            f"the model has several lists of layers ({known}), and only an example shows which "
            "of them run, and in which order; give one (layers='auto', example_kwargs={...}), or "
            f"name the lists in the order in which they run (layers=[{known}])"
        )
    calls = [call.path for call in dependencies.calls]
    return [path for call in calls for path in lists if call.startswith(f"{path}.")]


def find_own_dependencies(model: nn.Module, lists: Sequence[str]) -> Dependencies | None:
    """Return what a model depends on when it runs on its own example; None if it has none.

    The example may not fit the model, as that of a class above it; then there is none either.
    """
    try:
        example = _own_example(model)
        if not example:
            return None
        copy = _copy_on_meta(model)
        return find_dependencies(copy, find_units(copy, lists), (), example)
    except Exception as error:  # the model's own code on inputs that it may not be made for
        _LOGGER.debug("the model does not run on its own dummy_inputs: %s", error)
        return None


def _own_example(model: Any) -> dict[str, Any]:
    """Return the example that a model brings, in the way of models of `transformers`."""
    names, example = set(parameter_names(model)), getattr(model, "dummy_inputs", None)
    if "pixel_values" in names and "input_ids" not in names:
        size = model.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(2, model.config.num_channels, height, width)}
    if not isinstance(example, Mapping):
        return {}
    # A model with two towers takes words for the second too.
    if "decoder_input_ids" in names and "input_ids" in example:
        return {"decoder_input_ids": example["input_ids"], **example}
    return dict(example)


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
