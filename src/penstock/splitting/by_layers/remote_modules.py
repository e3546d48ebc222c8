"""Remote modules: what a stage has in place of modules that other stages call."""

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
from penstock.splitting.by_layers.module_description import ModuleDescription
from penstock.splitting.by_layers.replay import Replay
from penstock.splitting.by_layers.stand_ins import StandIn, stand_in

__all__ = ["HeldTensor", "PartlyRemoteModule", "RemoteModule", "adapt_stand_ins", "share_state"]


# Classes whose methods look at what they hold, such as the keys of a dict of modules.
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def share_state(module: nn.Module, other: nn.Module) -> None:
    """Share the parameters, buffers and children of another module."""
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        vars(module)[name] = getattr(other, name)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or buffer of a remote module, and whether it is in the state_dict."""

    tensor: torch.Tensor
    is_saved: bool


class RemoteModule(nn.Module):
    """A module of another stage, with its plain attributes but without its state.

    Its parts are made when the model's code uses them. `held` has the parameters and buffers that
    this stage uses nevertheless, by their names in the module.
    """

    _description: ModuleDescription
    _path: str
    _replay: Replay
    _is_unit: bool
    _own_hooks: HookTables

    def __init__(
        self,
        description: ModuleDescription,
        path: str,
        replay: Replay,
        *,
        held: Mapping[str, HeldTensor],
        is_unit: bool = True,
    ) -> None:
        super().__init__()
        vars(self).update(description.attributes)
        vars(self).update(description.tensors)
        vars(self).update(_description=description, _path=path, _replay=replay, _is_unit=is_unit)
        vars(self).update(_own_hooks=tables_of(self), _parameters=_Held(self))
        vars(self).update(_buffers=_Held(self, are_buffers=True))
        self.training = description.is_training
        for name, tensor in held.items():
            first, _, rest = name.partition(".")
            if rest:
                start = f"{first}."
                self._make_part(
                    first,
                    {n.removeprefix(start): k for n, k in held.items() if n.startswith(start)},
                )
            else:
                self._hold(name, tensor)

    def _hold(self, name: str, held: HeldTensor) -> None:
        del vars(self)[name]
        if isinstance(held.tensor, nn.Parameter):
            self.register_parameter(name, held.tensor)
        else:
            self.register_buffer(name, held.tensor, persistent=held.is_saved)

    def _make_part(self, name: str, held: Mapping[str, HeldTensor]) -> nn.Module:
        part = self._modules.get(name)
        if part is None:
            path, description = f"{self._path}.{name}", self._description.parts[name]
            part = RemoteModule(description, path, self._replay, held=held, is_unit=False)
            part.training = self.training
            if self._replay.moved is not None:
                adapt_stand_ins([part], *self._replay.moved)
            self._modules[name] = part
        return part

    def _make_parts(self) -> None:
        """Make all parts, in their order."""
        for name in self._description.parts:
            self._make_part(name, {})
            self._modules[name] = self._modules.pop(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returned on its own stage, and call its hooks here too."""
        if self._is_unit:
            return call_remote(self, self._path, self._replay, (args, kwargs))
        # A part of a unit that is called alone: no record has what it returned.
        stage, tables = self._replay.hooks, [self._description.hooks]
        args, kwargs = call_pre_hooks(self, self._path, tables, (args, kwargs), stage)
        output = super().__call__(*args, **kwargs)
        return call_hooks(self, self._path, tables, (args, kwargs), output, stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own code, with stand-ins for its tensors."""
        self._make_parts()
        return self._description.kind.forward(self, *args, **kwargs)

    def forget(self, names: Iterable[str]) -> None:
        """Drop attributes that the call on the other stage has changed."""
        for name in names:
            path, _, attribute = name.rpartition(".")
            part = self.get_submodule(path)
            vars(part).pop(attribute, None)
            vars(part)["_missing"] = {*vars(part).get("_missing", ()), attribute}

    def hook_tables(self) -> list[HookTables]:
        """Return the hooks of this remote module, and those of the module itself."""
        return [GLOBAL_TABLES, self._own_hooks, self._description.hooks]

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return all parts while the model's code runs, which may register hooks on them."""
        if self._replay.is_running:
            self._make_parts()
        return super().named_children()

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return all parts while the model's code runs, which may ask for their dtypes."""
        if self._replay.is_running:
            self._make_parts()
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(
            memo, prefix, remove_duplicate
        )
        return found

    def present_tensors(self, *, are_buffers: bool) -> Iterator[tuple[str, Any]]:
        """Return the module's own parameters or buffers, with stand-ins for those elsewhere."""
        if not self._replay.is_running:
            held: Any = self._buffers if are_buffers else self._parameters
            yield from dict.items(held)
            return
        for name in self._description.tensors:
            if (name in self._description.buffer_names) == are_buffers:
                yield name, getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        for state in ("_modules", "_parameters", "_buffers"):
            if name in self.__dict__.get(state, ()):
                return self.__dict__[state][name]
        description: ModuleDescription | None = self.__dict__.get("_description")
        if description is None:
            raise AttributeError(name)
        if name in self.__dict__.get("_missing", ()):
            raise ModelError(
                f"the model uses {self._path}.{name}, which was made on another stage when "
                f"{self._path!r} was called, but not returned by it; return it too"
            )
        if name in description.parts:
            return self._make_part(name, {})
        if not hasattr(description.kind, name):
            raise AttributeError(f"{description.kind.__name__!r} has no attribute {name!r}")
        if issubclass(description.kind, _CONTAINERS):
            self._make_parts()
        found = inspect.getattr_static(description.kind, name)
        return found.__get__(self, description.kind) if hasattr(found, "__get__") else found

    def __getitem__(self, key: Any) -> Any:
        self._make_parts()
        kind: Any = self._description.kind
        return kind.__getitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        self._make_parts()
        kind: Any = self._description.kind
        found: Iterator[Any] = kind.__iter__(self)
        return found

    def __len__(self) -> int:
        return len(self._description.parts) if hasattr(self._description.kind, "__len__") else 1

    @property  # type: ignore[misc]  # Python allows this
    def __class__(self) -> type:
        """The class of the module itself, while the model's code runs."""
        replay: Replay | None = self.__dict__.get("_replay")
        is_running = replay is not None and replay.is_running
        return self._description.kind if is_running else RemoteModule

    def extra_repr(self) -> str:
        """Return what to print."""
        return f"{self._description.kind.__name__} of another stage"


class _Held(dict[str, Any]):
    """What a remote module holds of its parameters or buffers.

    While the model's code runs it asks a model, or any part of it, for the dtype and device of its
    parameters, so that all of them are there, most as stand-ins.
    """

    def __init__(self, owner: RemoteModule, *, are_buffers: bool = False) -> None:
        super().__init__()
        self._owner, self._are_buffers = owner, are_buffers

    def items(self) -> Any:
        """Return what is held and, while the model's code runs, stand-ins for the rest."""
        return self._owner.present_tensors(are_buffers=self._are_buffers)


class PartlyRemoteModule(nn.Module):
    """A module of which this stage makes some calls, and other stages make others."""

    _module: nn.Module
    _path: str
    _replay: Replay

    def __init__(self, module: nn.Module, path: str, replay: Replay) -> None:
        super().__init__()
        share_state(self, module)
        vars(self).update(_module=module, _path=path, _replay=replay)
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or return what its call on another stage returned."""
        self._module.training = self.training
        if not self._replay.is_running:
            return self._module(*args, **kwargs)
        if not self._replay.is_own_call(self._path):
            return call_remote(self, self._path, self._replay, (args, kwargs))
        self._replay.enter(self._path, (args, kwargs))
        output = self._module(*args, **kwargs)
        self._replay.leave(self._path, output)
        return output

    def hook_tables(self) -> list[HookTables]:
        """Return the hooks of the module itself; those of this wrapper are called anyway."""
        return [tables_of(self._module, are_mirrored=True)]

    def __getattr__(self, name: str) -> Any:
        for state in ("_modules", "_parameters", "_buffers"):
            if name in self.__dict__.get(state, ()):
                return self.__dict__[state][name]
        if "_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_module"], name)

    @property  # type: ignore[misc]  # Python allows this
    def __class__(self) -> type:
        """The class of the module itself, while the model's code runs."""
        replay: Replay | None = self.__dict__.get("_replay")
        is_running = replay is not None and replay.is_running
        return type(self.__dict__["_module"]) if is_running else PartlyRemoteModule


def call_remote(
    module: RemoteModule | PartlyRemoteModule, path: str, replay: Replay, given: Given
) -> Any:
    """Return what a call on another stage returned, and call the hooks of the module.

    The output already has the changes that hooks make, since it was sent after them. Hooks are
    called for their side effects. A hook that changes the output gets what it got on the other
    stage.
    """
    returned, hook_calls = replay.remote_output_with_hooks(path, given)
    if path in replay.changed and isinstance(module, RemoteModule):
        module.forget(replay.changed[path])
    tables = [table for table in module.hook_tables() if table.before or table.after]
    if not tables and not hook_calls:
        return returned
    stage, output = replay.hooks, returned
    given = call_pre_hooks(module, path, tables, given, stage)
    for inner_path, (args, kwargs, made) in hook_calls:
        if inner_path == path:
            output = made
            continue
        part = module.get_submodule(inner_path.removeprefix(f"{path}."))
        inner = part.hook_tables() if isinstance(part, RemoteModule) else _tables_inside(part)
        seen = call_pre_hooks(part, inner_path, inner, (args, kwargs), stage)
        call_hooks(part, inner_path, inner, seen, made, stage)
    call_hooks(module, path, tables, given, output, stage)
    return returned


def _tables_inside(part: nn.Module) -> list[HookTables]:
    """Return the hooks of a module that this stage has, but does not call now."""
    return [GLOBAL_TABLES, tables_of(part, are_mirrored=True)]


def adapt_stand_ins(
    modules: Iterable[nn.Module],
    device: torch.device,
    dtypes: Mapping[torch.dtype, torch.dtype],
) -> None:
    """Move the stand-ins that modules hold to the device and dtype of their stage."""
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, StandIn):
                dtype = dtypes.get(value.dtype, value.dtype)
                source = ", ".join(sorted(value.sources))
                vars(module)[name] = stand_in(value.shape, dtype, device, source)
