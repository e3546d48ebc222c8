"""Tells of the calls of units, and of calls inside of them that hooks look at."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.modules.compiled import leave_uncompiled
from penstock.splitting.by_layers.example.changed_attributes import look_at
from penstock.splitting.by_layers.hooks.hooks import (
    GLOBAL_TABLES,
    Given,
    Hook,
    HookTables,
    is_active,
    tables_of,
)

__all__ = ["Listener", "UnitCalls"]


class Listener(Protocol):
    """Who is told; of what happens while it is not running, it is not."""

    is_running: bool

    def enter(self, path: str, given: Given) -> None:
        """A unit is called with this."""

    def leave(self, path: str, output: Any) -> None:
        """A unit returns this, after all hooks."""

    def observe(self, path: str, given: Given, output: Any) -> None:
        """A unit, or a part of one, has made this, and hooks will see it."""


class _OwnHook:
    """A hook of ours; a copy of the module that has it is watched by nobody."""

    def __init__(self, call: Hook) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        """Tell the listener."""
        self._call(*given)

    def __reduce__(self) -> tuple[type["_OwnHook"], tuple[Hook]]:
        return _OwnHook, (_ignore,)


def _ignore(*_given: Any) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Part:
    """A module that is called inside of a unit, or the unit itself."""

    path: str
    module: nn.Module
    tables: HookTables
    seen: tuple[object, ...] = ()
    hooks: tuple[Hook, ...] = ()
    recorder: RemovableHandle | None = None


@dataclass(slots=True, eq=False)
class _Watched:
    module: nn.Module
    parts: tuple[_Part, ...]
    handles: list[RemovableHandle] = field(default_factory=list)
    last: int | None = None


class UnitCalls:
    """Watches units by hooks of its own, which stay first and last whatever others register."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._watched: dict[str, _Watched] = {}

    def add(self, path: str, module: nn.Module, *, tells_itself: bool = False) -> None:
        """Watch a unit; one that `tells_itself` of its calls is looked at inside only."""
        parts = tuple(
            _Part(f"{path}.{name}" if name else path, inner, tables_of(inner))
            for name, inner in module.named_modules()
        )
        watched = self._watched[path] = _Watched(module, parts)
        if not tells_itself:
            enter = leave_uncompiled(module, _OwnHook(partial(_enter, self._listener, path)))
            leave = leave_uncompiled(module, _OwnHook(partial(_leave, self._listener, path)))
            watched.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            watched.handles.append(module.register_forward_hook(leave))
            watched.last = watched.handles[-1].id

    def attend(self, path: str) -> None:
        """A unit begins: see which hooks there are now, and come before and after all of them."""
        watched = self._watched.get(path)
        if watched is None:
            return
        hooks = watched.module._forward_hooks
        if watched.last is not None and next(reversed(hooks), None) != watched.last:
            hooks.move_to_end(watched.last)  # type: ignore[attr-defined]  # an OrderedDict, typed as a dict upstream
        has_global = bool(GLOBAL_TABLES.before or GLOBAL_TABLES.after)
        for part in watched.parts:
            if part.tables.before or part.tables.after or has_global:
                self._attend_part(watched.module, part)

    def _attend_part(self, unit: nn.Module, part: _Part) -> None:
        seen = _look(part)
        if seen != part.seen:
            part.hooks = (*part.tables.foreign(), *GLOBAL_TABLES.foreign())
            if part.hooks and not _is_first(part):
                self._record(unit, part)
            part.seen = _look(part)

    def _record(self, unit: nn.Module, part: _Part) -> None:
        if part.recorder is not None:
            part.recorder.remove()
        observe = leave_uncompiled(unit, _OwnHook(partial(_observe, self._listener, part)))
        part.recorder = part.module.register_forward_hook(observe, prepend=True, with_kwargs=True)

    def look_at(self, path: str) -> dict[str, Any]:
        """The plain attributes of a unit, as they are now."""
        watched = self._watched.get(path)
        return {} if watched is None else look_at(watched.module)

    def tables(self) -> Iterator[HookTables]:
        """The tables of hooks of all units and their parts."""
        return (part.tables for watched in self._watched.values() for part in watched.parts)

    def stop(self) -> None:
        """Take all hooks away again."""
        for watched in self._watched.values():
            recorders = (part.recorder for part in watched.parts)
            for handle in (*watched.handles, *(r for r in recorders if r is not None)):
                handle.remove()
        self._watched.clear()


def _look(part: _Part) -> tuple[object, ...]:
    """What changes if a hook comes or goes."""
    before, after = part.tables.before, part.tables.after
    ends = (next(reversed(before), None), next(iter(after), None), next(reversed(after), None))
    return (len(before), len(after), *ends, len(GLOBAL_TABLES.before), len(GLOBAL_TABLES.after))


def _is_first(part: _Part) -> bool:
    return part.recorder is not None and next(iter(part.tables.after), None) == part.recorder.id


def _enter(listener: Listener, path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
    if listener.is_running:
        listener.enter(path, (args, kwargs))


def _leave(listener: Listener, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
    if listener.is_running:
        listener.leave(path, output)


def _observe(
    listener: Listener, part: _Part, _module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    if listener.is_running and any(map(is_active, part.hooks)):
        listener.observe(part.path, (args, kwargs), output)
