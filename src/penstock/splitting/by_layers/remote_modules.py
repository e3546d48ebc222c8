"""Modules that stand in a stage for those that other stages call."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.by_layers.hooks.hooks import (
    GLOBAL_TABLES,
    Given,
    HookTables,
    call_hooks,
    call_pre_hooks,
    tables_of,
)
from penstock.splitting.by_layers.module_outline import Outline
from penstock.splitting.by_layers.replay import Replay
from penstock.splitting.by_layers.stand_ins import StandIn, stand_in

__all__ = ["HeldModule", "RemoteModule", "Sometimes", "adapt_stand_ins", "share_state"]


def share_state(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the parameters, buffers and children of another as its own."""
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(module)[name] = getattr(other, name)


@dataclass(frozen=True, slots=True)
class HeldModule:
    """A parameter or buffer of a module that is elsewhere; a buffer may be saved or not."""

    tensor: torch.Tensor
    is_saved: bool


class RemoteModule(nn.Module):
    """Stands where a module of another stage was; has its plain attributes, but no state.

    Its parts are made when the model's code asks for them. `held` has the parameters and buffers
    that this stage uses nevertheless, by their names in the module.
    """

    _outline: Outline
    _path: str
    _replay: Replay
    _is_unit: bool
    _own_hooks: HookTables

    def __init__(
        self,
        outline: Outline,
        path: str,
        replay: Replay,
        *,
        held: Mapping[str, HeldModule],
        is_unit: bool = True,
    ) -> None:
        super().__init__()
        vars(self).update(outline.attributes)
        vars(self).update(outline.tensors)
        vars(self).update(_outline=outline, _path=path, _replay=replay, _is_unit=is_unit)
        vars(self).update(_own_hooks=tables_of(self))
        self.training = outline.is_training
        for name, kept in held.items():
            first, _, rest = name.partition(".")
            if rest:
                start = f"{first}."
                self._make_part(
                    first,
                    {n.removeprefix(start): k for n, k in held.items() if n.startswith(start)},
                )
            else:
                self._hold(name, kept)

    def _hold(self, name: str, kept: HeldModule) -> None:
        del vars(self)[name]
        if isinstance(kept.tensor, nn.Parameter):
            self.register_parameter(name, kept.tensor)
        else:
            self.register_buffer(name, kept.tensor, persistent=kept.is_saved)

    def _make_part(self, name: str, held: Mapping[str, HeldModule]) -> nn.Module:
        part = self._modules.get(name)
        if part is None:
            path, outline = f"{self._path}.{name}", self._outline.parts[name]
            part = RemoteModule(outline, path, self._replay, held=held, is_unit=False)
            part.training = self.training
            if self._replay.moved is not None:
                adapt_stand_ins([part], *self._replay.moved)
            self._modules[name] = part
        return part

    def _make_parts(self) -> None:
        """Make all parts, in their order."""
        for name in self._outline.parts:
            self._make_part(name, {})
            self._modules[name] = self._modules.pop(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returned on its own stage; its hooks are called here too."""
        if self._is_unit:
            return call_elsewhere(self, self._path, self._replay, (args, kwargs))
        # A part of a unit, called by itself: nobody has noted what it returned.
        stage, tables = self._replay.hooks, [self._outline.hooks]
        args, kwargs = call_pre_hooks(self, self._path, tables, (args, kwargs), stage)
        output = super().__call__(*args, **kwargs)
        return call_hooks(self, self._path, tables, (args, kwargs), output, stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code, with stand-ins for what it holds."""
        self._make_parts()
        return self._outline.kind.forward(self, *args, **kwargs)

    def forget(self, names: Iterable[str]) -> None:
        """Lose attributes that the call, which another stage has made, gave other values."""
        for name in names:
            path, _, attribute = name.rpartition(".")
            part = self.get_submodule(path)
            vars(part).pop(attribute, None)
            vars(part)["_lost"] = {*vars(part).get("_lost", ()), attribute}

    def hook_tables(self) -> list[HookTables]:
        """The hooks that were put on this stand-in, and those of the module itself."""
        return [GLOBAL_TABLES, self._own_hooks, self._outline.hooks]

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """All parts, while the model's code looks for modules to put hooks on."""
        if self._replay.is_running:
            self._make_parts()
        return super().named_children()

    def __getattr__(self, name: str) -> Any:
        for state in ("_modules", "_parameters", "_buffers"):
            if name in self.__dict__.get(state, ()):
                return self.__dict__[state][name]
        outline: Outline | None = self.__dict__.get("_outline")
        if outline is None:
            raise AttributeError(name)
        if name in self.__dict__.get("_lost", ()):
            raise ModelError(
                f"the model uses {self._path}.{name}, which was made on another stage when "
                f"{self._path!r} was called, but not returned by it; let it return that too"
            )
        if name in outline.parts:
            return self._make_part(name, {})
        if not hasattr(outline.kind, name):
            raise AttributeError(f"{outline.kind.__name__!r} has no attribute {name!r}")
        found = inspect.getattr_static(outline.kind, name)
        return found.__get__(self, outline.kind) if hasattr(found, "__get__") else found

    def __getitem__(self, key: Any) -> Any:
        self._make_parts()
        kind: Any = self._outline.kind
        return kind.__getitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        self._make_parts()
        kind: Any = self._outline.kind
        found: Iterator[Any] = kind.__iter__(self)
        return found

    def __len__(self) -> int:
        return len(self._outline.parts) if hasattr(self._outline.kind, "__len__") else 1

    @property  # type: ignore[misc]  # Python lets a class say what its objects are
    def __class__(self) -> type:
        """While the model's code runs, this is what it stands for."""
        replay: Replay | None = self.__dict__.get("_replay")
        is_running = replay is not None and replay.is_running
        return self._outline.kind if is_running else RemoteModule

    def extra_repr(self) -> str:
        """What was here, for print."""
        return f"{self._outline.kind.__name__} of another stage"


class Sometimes(nn.Module):
    """A module of which this stage makes some of the calls, and other stages the others."""

    _module: nn.Module
    _path: str
    _replay: Replay

    def __init__(self, module: nn.Module, path: str, replay: Replay) -> None:
        super().__init__()
        share_state(self, module)
        vars(self).update(_module=module, _path=path, _replay=replay)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or give what another stage's call of it returned."""
        self._module.training = self.training
        if not self._replay.is_running:
            return self._module(*args, **kwargs)
        if not self._replay.is_own_call(self._path):
            return call_elsewhere(self, self._path, self._replay, (args, kwargs))
        self._replay.enter(self._path, (args, kwargs))
        output = self._module(*args, **kwargs)
        self._replay.leave(self._path, output)
        return output

    def hook_tables(self) -> list[HookTables]:
        """The hooks of the module itself; those that were put on this one are called anyway."""
        return [tables_of(self._module, are_mirrored=True)]

    def __getattr__(self, name: str) -> Any:
        for state in ("_modules", "_parameters", "_buffers"):
            if name in self.__dict__.get(state, ()):
                return self.__dict__[state][name]
        if "_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_module"], name)

    @property  # type: ignore[misc]  # Python lets a class say what its objects are
    def __class__(self) -> type:
        """While the model's code runs, this is the module."""
        replay: Replay | None = self.__dict__.get("_replay")
        is_running = replay is not None and replay.is_running
        return type(self.__dict__["_module"]) if is_running else Sometimes


def call_elsewhere(
    module: RemoteModule | Sometimes, path: str, replay: Replay, given: Given
) -> Any:
    """Answer a call that another stage makes, and call the hooks that look at it.

    What hooks make of the output is known already, since it is what was sent; they are called for
    what they do besides. Where they change it, they get what they got on the other stage.
    """
    answer, sides = replay.answer_with_sides(path)
    if path in replay.changed and isinstance(module, RemoteModule):
        module.forget(replay.changed[path])
    tables = [table for table in module.hook_tables() if table.before or table.after]
    if not tables and not sides:
        return answer
    stage, output = replay.hooks, answer
    given = call_pre_hooks(module, path, tables, given, stage)
    for place, (args, kwargs, made) in sides:
        if place == path:
            output = made
            continue
        part = module.get_submodule(place.removeprefix(f"{path}."))
        inner = part.hook_tables() if isinstance(part, RemoteModule) else _tables_inside(part)
        seen = call_pre_hooks(part, place, inner, (args, kwargs), stage)
        call_hooks(part, place, inner, seen, made, stage)
    call_hooks(module, path, tables, given, output, stage)
    return answer


def _tables_inside(part: nn.Module) -> list[HookTables]:
    """The hooks of a module that this stage has, but does not call now."""
    return [GLOBAL_TABLES, tables_of(part, are_mirrored=True)]


def adapt_stand_ins(
    modules: Iterable[nn.Module],
    device: torch.device,
    dtypes: Mapping[torch.dtype, torch.dtype],
) -> None:
    """Move the stand-ins that modules hold, as their stage was moved."""
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, StandIn):
                dtype = dtypes.get(value.dtype, value.dtype)
                source = ", ".join(sorted(value.sources))
                vars(module)[name] = stand_in(value.shape, dtype, device, source)
