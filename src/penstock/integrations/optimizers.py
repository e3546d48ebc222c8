"""Optimizers of a whole model, of which each process keeps the parameters that it trains."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import ArgumentError
from penstock.training.pipeline import Pipeline

__all__ = ["Places", "keep_own_parameters", "load_whole_optimizer", "names_of"]

# The numbers, in the optimizer of the whole model, of the parameters that each group has kept.
Places = list[list[int]]


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of every parameter of a model, by identity."""
    return {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}


def keep_own_parameters(
    optimizer: torch.optim.Optimizer, pipeline: Pipeline, names: Mapping[int, str]
) -> Places:
    """Leave an optimizer of the whole model the parameters that this process trains.

    `names` are those of the model's parameters, also before it got memory.
    """
    own = dict(pipeline.named_parameters())
    shared = pipeline.shared_names
    own |= {name: own[first] for name, first in shared.items() if first in own}
    here = {id(parameter) for parameter in own.values()}
    places, number = [], 0
    for group in optimizer.param_groups:
        kept: list[torch.Tensor] = []
        numbers = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if id(parameter) in here:
                kept.append(parameter)
                numbers.append(number)
            elif name is None:
                raise ArgumentError(
                    "an optimizer must have parameters of the pipeline's model only (got one of "
                    f"shape {tuple(parameter.shape)} from elsewhere); leave it out"
                )
            elif name in own:
                # A model without memory has got new parameters.
                kept.append(own[name])
                numbers.append(number)
            number += 1
        group["params"] = kept
        places.append(numbers)
    return places


def load_whole_optimizer(
    optimizer: torch.optim.Optimizer, places: Places, state: Mapping[str, Any]
) -> None:
    """Load the state of an optimizer of the whole model, as one process saves it."""
    numbers = [number for group in places for number in group]
    groups, first = [], 0
    for kept, group in zip(places, state["param_groups"], strict=True):
        groups.append({**group, "params": list(range(first, first + len(kept)))})
        first += len(kept)
    found = {own: state["state"][n] for own, n in enumerate(numbers) if n in state["state"]}
    optimizer.load_state_dict({"state": found, "param_groups": groups})
