"""Reports the calls of units to a listener, and calls inside of them that have hooks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.modules.compiled import leave_uncompiled
from penstock.splitting.by_layers.example.changed_attributes import read_attributes
from penstock.splitting.by_layers.hooks.hooks import (
    GLOBAL_TABLES,
    Given,
    Hook,
    HookTables,
    is_active,
    tables_of,
)

__all__ = ["CallListener", "UnitCalls"]


class CallListener(Protocol):
    """The receiver of reports, while it is running."""

    is_running: bool

    def enter(self, path: str, given: Given) -> None:
        """Begin a call of a unit with these arguments."""

    def leave(self, path: str, output: Any) -> None:
        """End a call of a unit with this output, after all hooks."""

    def observe(self, path: str, given: Given, output: Any) -> None:
        """Receive the output of a unit or of a part of it, before its hooks get it."""


class _OwnHook:
    """A hook of ours, which does nothing in a copy of its module."""

    def __init__(self, call: Hook) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        """Report to the listener."""
        self._call(*given)

    def __reduce__(self) -> tuple[type["_OwnHook"], tuple[Hook]]:
        return _OwnHook, (_ignore,)


def _ignore(*_given: Any) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Part:
    """A unit, or a module inside of it."""

    path: str
    module: nn.Module
    tables: HookTables
    seen: tuple[object, ...] = ()
    hooks: tuple[Hook, ...] = ()
    recorder: RemovableHandle | None = None


@dataclass(slots=True, eq=False)
class _ObservedUnit:
    module: nn.Module
    parts: tuple[_Part, ...]
    handles: list[RemovableHandle] = field(default_factory=list)
    last: int | None = None


class UnitCalls:
    """Observes units by its own hooks, which stay first and last whatever others register."""

    def __init__(self, listener: CallListener) -> None:
        self._listener = listener
        self._units: dict[str, _ObservedUnit] = {}

    def add(self, path: str, module: nn.Module, *, reports_itself: bool = False) -> None:
        """Observe a unit; of one that `reports_itself`, only the calls inside."""
        parts = tuple(
            _Part(f"{path}.{name}" if name else path, inner, tables_of(inner))
            for name, inner in module.named_modules()
        )
        unit = self._units[path] = _ObservedUnit(module, parts)
        if not reports_itself:
            enter = leave_uncompiled(module, _OwnHook(partial(_enter, self._listener, path)))
            leave = leave_uncompiled(module, _OwnHook(partial(_leave, self._listener, path)))
            unit.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            unit.handles.append(module.register_forward_hook(leave))
            unit.last = unit.handles[-1].id

    def prepare_hooks(self, path: str) -> None:
        """Find the present hooks of a unit that begins, and put ours first and last."""
        unit = self._units.get(path)
        if unit is None:
            return
        hooks = unit.module._forward_hooks
        if unit.last is not None and next(reversed(hooks), None) != unit.last:
            hooks.move_to_end(unit.last)  # type: ignore[attr-defined]  # an OrderedDict, typed as a dict upstream
        has_global = bool(GLOBAL_TABLES.before or GLOBAL_TABLES.after)
        for part in unit.parts:
            if part.tables.before or part.tables.after or has_global:
                self._prepare_part(unit.module, part)

    def _prepare_part(self, module: nn.Module, part: _Part) -> None:
        seen = _look(part)
        if seen != part.seen:
            part.hooks = (*part.tables.foreign(), *GLOBAL_TABLES.foreign())
            if part.hooks and not _is_first(part):
                self._record(module, part)
            part.seen = _look(part)

    def _record(self, module: nn.Module, part: _Part) -> None:
        if part.recorder is not None:
            part.recorder.remove()
        observe = leave_uncompiled(module, _OwnHook(partial(_observe, self._listener, part)))
        part.recorder = part.module.register_forward_hook(observe, prepend=True, with_kwargs=True)

    def read_attributes(self, path: str) -> dict[str, Any]:
        """Return the present plain attributes of a unit."""
        unit = self._units.get(path)
        return {} if unit is None else read_attributes(unit.module)

    def tables(self) -> Iterator[HookTables]:
        """Return the hook tables of all units and their parts."""
        return (part.tables for unit in self._units.values() for part in unit.parts)

    def stop(self) -> None:
        """Remove all our hooks."""
        for unit in self._units.values():
            recorders = (part.recorder for part in unit.parts)
            for handle in (*unit.handles, *(r for r in recorders if r is not None)):
                handle.remove()
        self._units.clear()


def _look(part: _Part) -> tuple[object, ...]:
    """Return something that differs after a hook was added or removed."""
    before, after = part.tables.before, part.tables.after
    ends = (next(reversed(before), None), next(iter(after), None), next(reversed(after), None))
    return (len(before), len(after), *ends, len(GLOBAL_TABLES.before), len(GLOBAL_TABLES.after))


def _is_first(part: _Part) -> bool:
    return part.recorder is not None and next(iter(part.tables.after), None) == part.recorder.id


def _enter(listener: CallListener, path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
    if listener.is_running:
        listener.enter(path, (args, kwargs))


def _leave(listener: CallListener, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
    if listener.is_running:
        listener.leave(path, output)


def _observe(
    listener: CallListener, part: _Part, _module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    if listener.is_running and any(map(is_active, part.hooks)):
        listener.observe(part.path, (args, kwargs), output)
