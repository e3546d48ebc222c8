"""What is known of a module everywhere: what it is, and the shapes of what it holds."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.modules.compiled import COMPILED_CALL
from penstock.splitting.by_layers.hooks.hooks import HookTables, tables_of
from penstock.splitting.by_layers.stand_ins import StandIn, stand_in

__all__ = ["Outline", "outline_of", "outline_tensor", "plain_attributes"]

# What a module that stands for another must not take from it: its state, and ways to run it.
_STATE = frozenset(vars(nn.Module()))
_WAYS_TO_RUN = frozenset({"forward", COMPILED_CALL})


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A module without its state: its class, its plain attributes, and its parts in outline.

    Tensors are stand-ins, from which a stage makes its own. The tables of hooks are the module's,
    so that stages know of those that are registered later.
    """

    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    tensors: Mapping[str, StandIn | None]
    parts: Mapping[str, "Outline"]
    is_training: bool
    hooks: HookTables


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has besides its state and ways to run it."""
    return {k: v for k, v in vars(module).items() if k not in _STATE and k not in _WAYS_TO_RUN}


def outline_of(module: nn.Module, path: str, constants: Collection[str] = ()) -> Outline:
    """A module in outline; `path` is where its values are to be had.

    A tensor that is a plain attribute may be one that the last run has left behind. Unless it is
    one of the `constants`, it is a stand-in too.
    """
    state = (*module._parameters.items(), *module._buffers.items())
    attributes = {
        name: value if f"{path}.{name}" in constants else _hide(value, f"{path}.{name}")
        for name, value in plain_attributes(module).items()
    }
    return Outline(
        type(module),
        attributes,
        {name: outline_tensor(tensor, path) for name, tensor in state},
        {
            name: outline_of(child, f"{path}.{name}", constants)
            for name, child in module._modules.items()
            if child is not None
        },
        module.training,
        tables_of(module, are_mirrored=True),
    )


def _hide(value: Any, path: str) -> Any:
    """An attribute with stand-ins for the tensors in it."""
    if isinstance(value, torch.Tensor):
        return stand_in(value.shape, value.dtype, value.device, path)
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_hide(item, path) for item in value)
    if type(value) is dict and any(isinstance(item, torch.Tensor) for item in value.values()):
        return {key: _hide(item, path) for key, item in value.items()}
    return value


def outline_tensor(tensor: torch.Tensor | None, path: str) -> StandIn | None:
    """A stand-in for a parameter or buffer of another stage, if the module has it."""
    if tensor is None:
        return None
    return stand_in(tensor.shape, tensor.dtype, tensor.device, path)
