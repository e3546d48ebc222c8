"""Stages of a model split by layers: each runs the model's own code with its own layers only."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from penstock.modules.compiled import leave_uncompiled, run_eagerly
from penstock.splitting.by_layers.example.unit_calls import UnitCalls
from penstock.splitting.by_layers.hooks.hooks import HookTables, tables_of
from penstock.splitting.by_layers.hooks.registrations import Registrations, next_number
from penstock.splitting.by_layers.remote_modules import (
    PartlyRemoteModule,
    RemoteModule,
    adapt_stand_ins,
    share_state,
)
from penstock.splitting.by_layers.replay import EndOfStage, Replay
from penstock.splitting.caches import find_configs, refuse_cache, without_cache

__all__ = ["FirstLayerStage", "LayerStage"]

RunModel = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class _StageBase(nn.Module):
    """All that the first and the other stages have in common, which is all but their inputs.

    It has the model's parameters and buffers under the model's own names.
    """

    _root: nn.Module
    _replay: Replay
    _units: tuple[tuple[str, nn.Module, bool], ...]
    _named: tuple[tuple[str, nn.Module], ...]
    _listeners: list[tuple[Callable[[str], None], Callable[[str], None]]]
    _unit_calls: UnitCalls | None
    _registrations: Registrations
    _tables: tuple[HookTables, ...]
    _configs: tuple[Any, ...]
    _run_by: RunModel | None
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
        # As a child, the copy of the model would change all names. It shares its dicts instead.
        share_state(self, root)
        vars(self).update(_root=root, _replay=replay, _units=tuple(units), _unit_calls=None)
        vars(self).update(_run_by=None)
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
        """Leave out what observes the modules, because a copy has its own modules."""
        return {**vars(self), "_unit_calls": None, "_tables": ()}

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._unit_calls is None:
            self._observe_units()
        while self._listeners:
            self._listen(*self._listeners.pop())
        self._root.training = self.training
        try:
            eagerly = run_eagerly(self) if self._replay.is_observed else nullcontext()
            if self._run_by is not None:
                with self._own_hooks(), eagerly:
                    output = self._run_by(self._root, args, kwargs)
            else:
                with self._own_hooks(), eagerly, without_cache(self._configs):
                    output = self._root(*args, **kwargs)
        except EndOfStage:
            return self._replay.messages()
        return self._replay.check_output(output)

    def _observe_units(self) -> None:
        """Observe what own units return; done late, when modules are in their final form."""
        calls = UnitCalls(self._replay)
        for path, module, reports_itself in self._units:
            calls.add(path, module, reports_itself=reports_itself)
        self._replay.prepare_hooks = calls.prepare_hooks
        self._replay.read_attributes = calls.read_attributes
        units = {module for _, module, _ in self._units}
        others = [self._root, *(m for m in _modules_beside(self._root, units))]
        tables = (*calls.tables(), *map(tables_of, others))
        vars(self).update(_unit_calls=calls, _tables=tables)

    def stop_observing(self) -> None:
        """Remove our hooks from the model's own layers; the next run, if any, observes again."""
        if self._unit_calls is not None:
            self._unit_calls.stop()
            vars(self).update(_unit_calls=None, _tables=())

    @contextmanager
    def _own_hooks(self) -> Iterator[None]:
        """Make hooks refer to this stage's copies, and find those that a run registers."""
        hooks, start = self._replay.hooks, next_number()
        hooks.install(table for table in self._tables if table.after or table.before)
        try:
            yield
        finally:
            hooks.restore()
            if next_number() != start:
                self._registrations.record(self._replay.index, start, self._tables, hooks.copies)

    def run_model_by(self, run: RunModel | None) -> None:
        """Have the model run by a function, which may add arguments that only this stage has.

        It is called with the model and its arguments. Caches are left to it.
        """
        vars(self).update(_run_by=run)

    def announce_layers(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """Call `enter` before and `leave` after every module that is assigned as a whole.

        These are all units, also those of other stages, and modules without state. A module may
        call others inside; only the outermost calls have the same order on every stage.
        """
        self._listeners.append((enter, leave))

    def _listen(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        for path, module in self._named:
            before = leave_uncompiled(module, partial(_call_with, enter, path))
            after = leave_uncompiled(module, partial(_call_with, leave, path))
            module.register_forward_pre_hook(before)
            # Recomputing a layer may end early, by an exception, and has left it then.
            module.register_forward_hook(after, always_call=True)

    def _first_parameter(self) -> nn.Parameter | None:
        """Return one of this stage's parameters, without a walk through all modules."""
        if self._first is None:
            return None
        parameters, name = self._first
        return parameters.get(name)

    def _find_device(self) -> torch.device:
        """Return the device of this stage; its stand-ins are moved there too."""
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
        """Call a function with every module of this stage, children first, as the model does."""
        for module in self.children():
            module.apply(partial(_call_if_here, fn))
        fn(self._root)
        return self


class FirstLayerStage(_StageBase):
    """The first stage, which takes what the model takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this stage's part of the model's forward."""
        refuse_cache(self._configs, kwargs)
        with self._replay.running(self._find_device()):
            self._replay.record_inputs(args, kwargs)
            return self._run(args, kwargs)


class LayerStage(_StageBase):
    """Any other stage, which takes the messages of the stages that feed it."""

    def forward(self, *messages: dict[str, Any]) -> Any:
        """Run this stage's part of the model's forward."""
        with self._replay.running(self._find_device()):
            args, kwargs = self._replay.receive(messages)
            return self._run(args, kwargs)


def _find_first(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter | None], str] | None:
    """Return the dict and the name of a module's first parameter, which may be replaced later."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                return inner._parameters, name
    return None


def _modules_beside(root: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the containers of a stage and what is in them, except units and remote modules."""
    for module in root._modules.values():
        if module is not None and module not in units and not isinstance(module, RemoteModule):
            yield module
            if not isinstance(module, PartlyRemoteModule):
                yield from _modules_beside(module, units)


def _call_with(function: Callable[[str], None], path: str, *_: object) -> None:
    function(path)


def _call_if_here(function: Callable[[nn.Module], object], module: nn.Module) -> None:
    if not isinstance(module, RemoteModule):
        function(module)
