"""Builds the stages of a model split by layers, as copies of its containers around its units."""

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import nn

from penstock.modules.compiled import COMPILED_CALL
from penstock.splitting.by_layers.hooks.hooks import keeping_hooks, tables_of
from penstock.splitting.by_layers.hooks.rebinding import StageHooks
from penstock.splitting.by_layers.hooks.registrations import Registrations
from penstock.splitting.by_layers.layer_stage import FirstLayerStage, LayerStage
from penstock.splitting.by_layers.module_description import (
    ModuleDescription,
    describe_module,
    stand_in_for,
)
from penstock.splitting.by_layers.records.call_records import parameter_names
from penstock.splitting.by_layers.remote_modules import (
    HeldTensor,
    PartlyRemoteModule,
    RemoteModule,
)
from penstock.splitting.by_layers.replay import Replay
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.units import Unit, Units

__all__ = ["build_layer_stages"]


def build_layer_stages(
    model: nn.Module, units: Units, routes: LayerRoutes
) -> list[FirstLayerStage | LayerStage]:
    """Build all stages of a model."""
    descriptions = {
        unit.path: describe_module(unit.module, unit.path, routes.constants)
        for unit in units.units
    }
    registrations = Registrations(routes.num_stages)
    return [
        _build_stage(model, units, routes, descriptions, registrations, index)
        for index in range(routes.num_stages)
    ]


def _build_stage(
    model: nn.Module,
    units: Units,
    routes: LayerRoutes,
    descriptions: Mapping[str, ModuleDescription],
    registrations: Registrations,
    index: int,
) -> FirstLayerStage | LayerStage:
    """Build one stage: its own units, remote modules for others, and copies of the containers."""
    held = [unit for unit in units.units if index in routes.callers(unit.path)]
    layers = [unit.path for unit in held if unit.layer is not None]
    hooks = StageHooks(registrations.local)
    replay = Replay(index, routes, layers, parameter_names(model), hooks)
    builder = _Builder(units, routes, descriptions, replay)
    root = builder.clone("", model)
    hooks.copies.update((m, c) for m, c in builder.clones.items() if m is not c)
    hooks.modules = tuple(builder.clones.values())
    hooks.rebind_all(map(tables_of, model.modules()))
    # A module that several stages call reports its calls itself.
    observed = [(u.path, u.module, len(routes.callers(u.path)) > 1) for u in held]
    make = LayerStage if index else FirstLayerStage
    return make(root, replay, observed, builder.named, registrations)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Copies the containers of a model for one stage, a shared one only once."""

    units: Units
    routes: LayerRoutes
    descriptions: Mapping[str, ModuleDescription]
    replay: Replay
    clones: dict[nn.Module, nn.Module] = field(default_factory=dict)
    # The module of this stage for each unit, and for each module without state.
    named: list[tuple[str, nn.Module]] = field(default_factory=list)

    def clone(self, path: str, module: nn.Module) -> nn.Module:
        """Return a copy of a container, with the children that it has on this stage."""
        if module in self.clones:
            return self.clones[module]
        made = self.clones[module] = copy(module)
        for name in ("_parameters", "_buffers", "_modules"):
            vars(made)[name] = dict(getattr(module, name))
        vars(made)["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        _bind_forward(made, module)
        self._place_parameters(path, made)
        self._place_buffers(path, made)
        for name, child in module._modules.items():
            if child is not None:
                made._modules[name] = self._place(f"{path}.{name}".lstrip("."), child)
        return made

    def _place(self, path: str, module: nn.Module) -> nn.Module:
        unit = self.units.find(path)
        if unit is not None:
            return self._place_unit(unit)
        container = self.units.find_container(path)
        if container is not None:
            return self.clone(container, module)
        # It holds no state, so every stage may have its own; its hooks are the model's.
        free = deepcopy(module, keeping_hooks(module))
        self.named.append((path, free))
        return free

    def _place_unit(self, unit: Unit) -> nn.Module:
        if unit.module not in self.clones:
            made = self.clones[unit.module] = self._make_unit(unit)
            self.named.append((unit.path, made))
        return self.clones[unit.module]

    def _make_unit(self, unit: Unit) -> nn.Module:
        callers = self.routes.callers(unit.path)
        if self.replay.index not in callers:
            description = self.descriptions[unit.path]
            return RemoteModule(description, unit.path, self.replay, held=self._held_tensors(unit))
        if len(callers) > 1:
            return PartlyRemoteModule(unit.module, unit.path, self.replay)
        return unit.module

    def _held_tensors(self, unit: Unit) -> dict[str, HeldTensor]:
        """Return the tensors that this stage uses of a unit that it does not call, by name."""
        held = self.routes.held_tensors(self.replay.index, unit.path)
        saved = unit.module.state_dict() if held else {}
        state: dict[str, torch.Tensor] = {
            **dict(unit.module.named_parameters(remove_duplicate=False)),
            **dict(unit.module.named_buffers(remove_duplicate=False)),
        }
        return {name: HeldTensor(state[name], name in saved) for name in held}

    def _place_parameters(self, path: str, made: nn.Module) -> None:
        """Replace a container's own parameters by stand-ins, if another stage holds them."""
        for name, parameter in list(made._parameters.items()):
            whole = f"{path}.{name}".lstrip(".")
            if parameter is None or self.routes.holds_tensor(self.replay.index, whole):
                continue
            del made._parameters[name]
            vars(made)[name] = stand_in_for(parameter, whole)

    def _place_buffers(self, path: str, made: nn.Module) -> None:
        """Copy a container's own buffers, or replace them by stand-ins if this stage reads none.

        Every stage that may read a buffer has it, and writes to it like the others.
        """
        for name, buffer in list(made._buffers.items()):
            whole = f"{path}.{name}".lstrip(".")
            if buffer is None or self.routes.holds_tensor(self.replay.index, whole):
                continue
            if self.replay.index in self.routes.written.get(whole, {self.replay.index}):
                made._buffers[name] = buffer.detach().clone()
            else:
                del made._buffers[name]
                vars(made)[name] = stand_in_for(buffer, whole)
            if not self.routes.is_guessed:
                made._non_persistent_buffers_set.add(name)


def _bind_forward(made: nn.Module, original: nn.Module) -> None:
    """Bind a copy's `forward` to the copy, if one was assigned to the original."""
    vars(made).pop(COMPILED_CALL, None)
    given = vars(original).get("forward")
    if isinstance(given, MethodType) and given.__self__ is original:
        vars(made)["forward"] = MethodType(given.__func__, made)
