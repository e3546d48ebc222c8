"""A stage of a model split by layers: the model's own code, with the layers of others left out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from penstock.modules.compiled import COMPILED_CALL, leave_uncompiled, run_eagerly
from penstock.splitting.by_layers.example.unit_calls import UnitCalls
from penstock.splitting.by_layers.hooks.hooks import HookTables, keeping_hooks, tables_of
from penstock.splitting.by_layers.hooks.rebinding import StageHooks
from penstock.splitting.by_layers.hooks.registrations import Registrations, next_number
from penstock.splitting.by_layers.inputs import parameter_names
from penstock.splitting.by_layers.module_outline import Outline, outline_of, outline_tensor
from penstock.splitting.by_layers.remote_modules import (
    HeldModule,
    RemoteModule,
    Sometimes,
    adapt_stand_ins,
    share_state,
)
from penstock.splitting.by_layers.replay import Departure, Replay
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.units import Unit, Units
from penstock.splitting.caches import find_configs, refuse_cache, without_cache

__all__ = ["FirstLayerStage", "LayerStage", "build_layer_stages"]


class _Body(nn.Module):
    """What the first and the other stages have in common: all but what they take in.

    It has the model's parameters and buffers under the model's own names.
    """

    _root: nn.Module
    _replay: Replay
    _units: tuple[tuple[str, nn.Module, bool], ...]
    _named: tuple[tuple[str, nn.Module], ...]
    _listeners: list[tuple[Callable[[str], None], Callable[[str], None]]]
    _watch: UnitCalls | None
    _registrations: Registrations
    _tables: tuple[HookTables, ...]
    _configs: tuple[Any, ...]
    _first: tuple[dict[str, nn.Parameter | None], str] | None
    _built_as: torch.dtype | None
    _now: tuple[torch.device, torch.dtype | None]

    def __init__(
        self,
        root: nn.Module,
        replay: Replay,
        units: Iterable[tuple[str, nn.Module, bool]],
        named: Iterable[tuple[str, nn.Module]],
        registrations: Registrations,
    ) -> None:
        super().__init__()
        # The copy of the model is no child, which would change all names; it shares its dicts.
        share_state(self, root)
        vars(self).update(_root=root, _replay=replay, _units=tuple(units), _watch=None)
        vars(self).update(_named=tuple(named), _listeners=[], _registrations=registrations)
        vars(self).update(_tables=(), _configs=find_configs(root))
        vars(self).update(
            _first=_find_first(self), _built_as=None, _now=(torch.device("cpu"), None)
        )
        first = self._first_parameter()
        if first is not None:
            vars(self).update(_built_as=first.dtype, _now=(first.device, first.dtype))
        self.training = root.training

    def __getstate__(self) -> dict[str, Any]:
        """All but the watch, which a copy starts again with its own modules."""
        return {**vars(self), "_watch": None, "_tables": ()}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._watch is None:
            self._start_watch()
        while self._listeners:
            self._listen(*self._listeners.pop())
        self._root.training = self.training
        try:
            eagerly = run_eagerly(self) if self._replay.is_watched else nullcontext()
            with self._own_hooks(), eagerly, without_cache(self._configs):
                output = self._root(*args, **kwargs)
        except Departure:
            return self._replay.pack()
        return self._replay.check_output(output)

    def _start_watch(self) -> None:
        """See what own units return; asked for late, when modules are as they will be run."""
        watch = UnitCalls(self._replay)
        for path, module, tells_itself in self._units:
            watch.add(path, module, tells_itself=tells_itself)
        self._replay.attend, self._replay.look_at = watch.attend, watch.look_at
        units = {module for _, module, _ in self._units}
        others = [self._root, *(m for m in _modules_beside(self._root, units))]
        tables = (*watch.tables(), *map(tables_of, others))
        vars(self).update(_watch=watch, _tables=tables)

    @contextmanager
    def _own_hooks(self) -> Iterator[None]:
        """Let hooks refer to this stage's copies, and see which ones a run registers."""
        hooks, start = self._replay.hooks, next_number()
        hooks.swap(table for table in self._tables if table.after or table.before)
        try:
            yield
        finally:
            hooks.restore()
            if next_number() != start:
                self._registrations.note(self._replay.index, start, self._tables, hooks.copies)

    def announce_layers(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """Call `enter` before and `leave` after every module that is dealt out as a whole.

        That is all units, those of other stages too, and modules without state beside them. Only
        forwards outside of others say something about the order; a module may call others inside.
        """
        self._listeners.append((enter, leave))

    def _listen(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        for path, module in self._named:
            before = leave_uncompiled(module, partial(_call_with, enter, path))
            after = leave_uncompiled(module, partial(_call_with, leave, path))
            module.register_forward_pre_hook(before)
            # Running a layer again may stop half-way, by an exception, and has left it then.
            module.register_forward_hook(after, always_call=True)

    def _first_parameter(self) -> nn.Parameter | None:
        """One of this stage's parameters, without a walk through all that is elsewhere."""
        if self._first is None:
            return None
        parameters, name = self._first
        return parameters.get(name)

    def _find_device(self) -> torch.device:
        """Where this stage is now; what stands for the tensors of others is there too."""
        first = self._first_parameter()
        if first is not None and (first.device, first.dtype) != self._now:
            self._adapt(first.device, first.dtype)
        return self._now[0]

    def _adapt(self, device: torch.device, dtype: torch.dtype) -> None:
        _, before = self._now
        if before is not None and self._built_as is not None:
            adapt_stand_ins([self._root, *self.modules()], device, {before: dtype})
            self._replay.moved = device, {self._built_as: dtype}
        vars(self).update(_now=(device, dtype))

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Call a function with every module of this stage as the model has it, children first."""
        for module in self.children():
            module.apply(partial(_call_if_here, fn))
        fn(self._root)
        return self


class FirstLayerStage(_Body):
    """The first stage: takes what the model takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage's part of the model's forward."""
        refuse_cache(self._configs, kwargs)
        with self._replay.running(self._find_device()):
            self._replay.start(args, kwargs)
            return self._run(args, kwargs)


class LayerStage(_Body):
    """Any other stage: takes what the stages that feed it have sent."""

    def forward(self, *parcels: dict[str, Any]) -> Any:
        """Run this stage's part of the model's forward."""
        with self._replay.running(self._find_device()):
            args, kwargs = self._replay.unpack(parcels)
            return self._run(args, kwargs)


def _find_first(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter | None], str] | None:
    """Where the first parameter of a module is, whatever may be put there later."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                return inner._parameters, name
    return None


def _modules_beside(root: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """The containers of a stage and what stands in them, besides units and what is elsewhere."""
    for module in root._modules.values():
        if module is not None and module not in units and not isinstance(module, RemoteModule):
            yield module
            if not isinstance(module, Sometimes):
                yield from _modules_beside(module, units)


def _call_with(function: Callable[[str], None], path: str, *_: object) -> None:
    function(path)


def _call_if_here(function: Callable[[nn.Module], object], module: nn.Module) -> None:
    if not isinstance(module, RemoteModule):
        function(module)


def build_layer_stages(
    model: nn.Module, units: Units, itinerary: LayerRoutes
) -> list[FirstLayerStage | LayerStage]:
    """All stages; what is known of a unit everywhere is found out once."""
    outlines = {
        unit.path: outline_of(unit.module, unit.path, itinerary.constants) for unit in units.units
    }
    registrations = Registrations(itinerary.num_stages)
    return [
        _build_stage(model, units, itinerary, outlines, registrations, index)
        for index in range(itinerary.num_stages)
    ]


def _build_stage(
    model: nn.Module,
    units: Units,
    itinerary: LayerRoutes,
    outlines: Mapping[str, Outline],
    registrations: Registrations,
    index: int,
) -> FirstLayerStage | LayerStage:
    """One stage: its own units, stand-ins for those of others, and copies of what is around."""
    held = [unit for unit in units.units if index in itinerary.callers(unit.path)]
    layers = [unit.path for unit in held if unit.layer is not None]
    hooks = StageHooks(registrations.local)
    replay = Replay(index, itinerary, layers, parameter_names(model), hooks)
    builder = _Builder(units, itinerary, outlines, replay)
    root = builder.clone("", model)
    hooks.copies.update((m, c) for m, c in builder.clones.items() if m is not c)
    hooks.modules = tuple(builder.clones.values())
    hooks.meet(map(tables_of, model.modules()))
    # A module that several stages call tells of its calls itself.
    watched = [(u.path, u.module, len(itinerary.callers(u.path)) > 1) for u in held]
    make = LayerStage if index else FirstLayerStage
    return make(root, replay, watched, builder.named, registrations)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Copies the containers of a model for one stage, a shared one once."""

    units: Units
    itinerary: LayerRoutes
    outlines: Mapping[str, Outline]
    replay: Replay
    clones: dict[nn.Module, nn.Module] = field(default_factory=dict)
    # What stands on this stage in the place of each unit, and of each module that holds no state.
    named: list[tuple[str, nn.Module]] = field(default_factory=list)

    def clone(self, path: str, module: nn.Module) -> nn.Module:
        """A container with the children that it has on this stage."""
        if module in self.clones:
            return self.clones[module]
        made = self.clones[module] = copy(module)
        for name in ("_parameters", "_buffers", "_modules"):
            vars(made)[name] = dict(getattr(module, name))
        vars(made)["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        _run_by_itself(made, module)
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
        # It holds no state, so that every stage may have its own; its hooks are the model's.
        free = deepcopy(module, keeping_hooks(module))
        self.named.append((path, free))
        return free

    def _place_unit(self, unit: Unit) -> nn.Module:
        if unit.module not in self.clones:
            made = self.clones[unit.module] = self._make_unit(unit)
            self.named.append((unit.path, made))
        return self.clones[unit.module]

    def _make_unit(self, unit: Unit) -> nn.Module:
        callers = self.itinerary.callers(unit.path)
        if self.replay.index not in callers:
            outline = self.outlines[unit.path]
            return RemoteModule(outline, unit.path, self.replay, held=self._held_parts(unit))
        if len(callers) > 1:
            return Sometimes(unit.module, unit.path, self.replay)
        return unit.module

    def _held_parts(self, unit: Unit) -> dict[str, HeldModule]:
        """What this stage uses of a unit that it does not call, by the names in the unit."""
        held = self.itinerary.held_parts(self.replay.index, unit.path)
        saved = unit.module.state_dict() if held else {}
        state: dict[str, torch.Tensor] = {
            **dict(unit.module.named_parameters(remove_duplicate=False)),
            **dict(unit.module.named_buffers(remove_duplicate=False)),
        }
        return {name: HeldModule(state[name], name in saved) for name in held}

    def _place_parameters(self, path: str, made: nn.Module) -> None:
        """Parameters of a container itself: held here, or an outline."""
        for name, parameter in list(made._parameters.items()):
            whole = f"{path}.{name}".lstrip(".")
            if parameter is None or self.itinerary.holds_loose(self.replay.index, whole):
                continue
            del made._parameters[name]
            vars(made)[name] = outline_tensor(parameter, whole)

    def _place_buffers(self, path: str, made: nn.Module) -> None:
        """Buffers of a container itself: every stage that may read one has it, and keeps it up."""
        for name, buffer in list(made._buffers.items()):
            whole = f"{path}.{name}".lstrip(".")
            if buffer is None or self.itinerary.holds_loose(self.replay.index, whole):
                continue
            if self.replay.index in self.itinerary.written.get(whole, {self.replay.index}):
                made._buffers[name] = buffer.detach().clone()
            else:
                del made._buffers[name]
                vars(made)[name] = outline_tensor(buffer, whole)
            if not self.itinerary.is_guessed:
                made._non_persistent_buffers_set.add(name)


def _run_by_itself(made: nn.Module, original: nn.Module) -> None:
    """Let a copy run its own forward, where the original was given another one."""
    vars(made).pop(COMPILED_CALL, None)
    given = vars(original).get("forward")
    if isinstance(given, MethodType) and given.__self__ is original:
        vars(made)["forward"] = MethodType(given.__func__, made)
