"""Descriptions of modules that other stages hold: their class, attributes and tensor shapes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.modules.compiled import COMPILED_CALL
from penstock.splitting.by_layers.hooks.hooks import HookTables, tables_of
from penstock.splitting.by_layers.stand_ins import StandIn, stand_in

__all__ = ["ModuleDescription", "describe_module", "plain_attributes", "stand_in_for"]

# What a remote module must not take from the module: its state, and ways to run it.
_STATE = frozenset(vars(nn.Module()))
_WAYS_TO_RUN = frozenset({"forward", COMPILED_CALL})


@dataclass(frozen=True, slots=True, eq=False)
class ModuleDescription:
    """A module without its state: its class, its plain attributes, and descriptions of its parts.

    Tensors are stand-ins, the parameters before the buffers. The tables of hooks are the module's
    own, so that stages find hooks that are registered later.
    """

    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    tensors: Mapping[str, StandIn | None]
    buffer_names: frozenset[str]
    parts: Mapping[str, "ModuleDescription"]
    is_training: bool
    hooks: HookTables


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module has besides its state and ways to run it."""
    return {k: v for k, v in vars(module).items() if k not in _STATE and k not in _WAYS_TO_RUN}


def describe_module(
    module: nn.Module, path: str, constants: Collection[str] = ()
) -> ModuleDescription:
    """Describe the module at a path of the model.

    A tensor that is a plain attribute may be left from the last run. Unless it is one of the
    `constants`, it is a stand-in too.
    """
    state = (*module._parameters.items(), *module._buffers.items())
    attributes = {
        name: value if f"{path}.{name}" in constants else _hide(value, f"{path}.{name}")
        for name, value in plain_attributes(module).items()
    }
    return ModuleDescription(
        type(module),
        attributes,
        {name: stand_in_for(tensor, path) for name, tensor in state},
        frozenset(module._buffers),
        {
            name: describe_module(child, f"{path}.{name}", constants)
            for name, child in module._modules.items()
            if child is not None
        },
        module.training,
        tables_of(module, are_mirrored=True),
    )


def _hide(value: Any, path: str) -> Any:
    """Return an attribute with stand-ins for the tensors in it."""
    if isinstance(value, torch.Tensor):
        return stand_in(value.shape, value.dtype, value.device, path)
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_hide(item, path) for item in value)
    if type(value) is dict and any(isinstance(item, torch.Tensor) for item in value.values()):
        return {key: _hide(item, path) for key, item in value.items()}
    return value


def stand_in_for(tensor: torch.Tensor | None, path: str) -> StandIn | None:
    """Return a stand-in for a parameter or buffer of another stage, or None for None."""
    if tensor is None:
        return None
    return stand_in(tensor.shape, tensor.dtype, tensor.device, path)
