"""The future state of this process's optimizer: checked, tried out, and taken back if need be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.checkpoint.content import name_parameters, optimizer_class
from penstock.checkpoint.host_memory import host_memory
from penstock.checkpoint.loading.optimizer_checks import (
    check_kind,
    check_setting,
    check_state,
)
from penstock.checkpoint.loading.reading import Target
from penstock.checkpoint.loading.targets import saved_names
from penstock.checkpoint.manifest import Manifest
from penstock.checkpoint.parts import Box, local_box, local_part
from penstock.errors import CheckpointError
from penstock.training.pipeline import Pipeline
from penstock.untrusted import quote

__all__ = ["OptimizerPart", "optimizer_part"]

# Settings of an optimizer that select an implementation.
_MACHINERY = frozenset({"capturable", "differentiable", "foreach", "fused"})


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A value of the state that is sharded like its parameter."""

    number: int
    key: str
    parameter: DTensor


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """The future state of an optimizer, by the number of its parameter; `targets` are unread.

    `exact` has the parameters that have the type with which they were saved, by number.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]] = field(default_factory=list)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    sharded: list[_Sharded] = field(default_factory=list)
    exact: dict[int, torch.Tensor] = field(default_factory=dict)
    # What the optimizer had before, while the new state is tried out.
    before: list[tuple[Any, Any]] = field(default_factory=list)

    def apply(self) -> None:
        """Give the state to the optimizer; torch moves it to the devices of its parameters."""
        for item in self.sharded:
            local = self.state[item.number][item.key]
            whole = torch.empty_like(item.parameter, dtype=local.dtype)
            local_part(whole).copy_(local)
            self.state[item.number][item.key] = whole
        self.before.append((self.optimizer.state, self.optimizer.param_groups))
        self.optimizer.load_state_dict({"state": self.state, "param_groups": self.groups})
        # Torch casts state to the type of its parameter, which not all of it had.
        for number, parameter in self.exact.items():
            kept = self.optimizer.state[parameter]
            for key, value in self.state[number].items():
                if isinstance(value, torch.Tensor):
                    kept[key] = value.to(kept[key].device)

    def undo(self) -> None:
        """Give the optimizer back what it had; loading has replaced it, and not changed it."""
        if self.before:
            self.optimizer.state, self.optimizer.param_groups = self.before.pop()


def optimizer_part(
    manifest: Manifest,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    *,
    is_other_allowed: bool,
) -> OptimizerPart:
    """Return what the checkpoint has for the parameters of this optimizer."""
    check_kind(manifest.optimizer, optimizer_class(optimizer), is_other_allowed=is_other_allowed)
    named = name_parameters(pipeline, optimizer)
    saved = saved_names(manifest, pipeline, named.values())
    names = {parameter: saved[name] for parameter, name in named.items()}
    keys = [*manifest.tensors, *manifest.values]
    kept = _by_parameter("optim.state.", keys)
    settings = _by_parameter("optim.param_groups.", keys)
    part = OptimizerPart(optimizer)
    for group in optimizer.param_groups:
        numbers = []
        for parameter in group["params"]:
            name, number = names[parameter], len(part.state)
            if name not in settings:
                raise CheckpointError(
                    f"the checkpoint must have optimizer state for {quote(name)} (it was saved "
                    "without); load without the optimizer, or leave the parameter out of it"
                )
            numbers.append(number)
            if manifest.tensors[f"model.{name}"].torch_dtype == parameter.dtype:
                part.exact[number] = parameter
            part.state[number] = {}
            for key in kept.get(name, ()):
                _add_state(part, manifest, number, f"optim.state.{name}", key, parameter)
        own = {names[parameter]: parameter for parameter in group["params"]}
        check_state(manifest, optimizer, own, kept)
        found = _group_settings(manifest, optimizer, group, list(own), settings)
        part.groups.append({**found, "params": numbers})
    return part


def _by_parameter(prefix: str, keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the last words of keys with this prefix, by parameter."""
    found: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(last)
    return found


def _add_state(
    part: OptimizerPart,
    manifest: Manifest,
    number: int,
    prefix: str,
    last: str,
    parameter: torch.Tensor,
) -> None:
    """Add a plain value, or memory for a tensor, which is sharded if its parameter is."""
    key = f"{prefix}.{last}"
    if key in manifest.values:
        part.state[number][last] = manifest.values[key]
        return
    saved = manifest.tensors[key]
    box = Box((0,) * len(saved.shape), saved.shape)
    if isinstance(parameter, DTensor) and saved.shape:
        if saved.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{quote(key)} must have the shape {list(parameter.shape)} of its sharded "
                f"parameter (got {quote(list(saved.shape))}); load it where the parameter is not "
                "sharded"
            )
        box = local_box(parameter)
        part.sharded.append(_Sharded(number, last, parameter))
    numbers = host_memory(box.sizes, saved.torch_dtype)
    part.targets.append(Target(key, box, numbers))
    part.state[number][last] = numbers


def _group_settings(
    manifest: Manifest,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    names: Sequence[str],
    settings: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return the settings of a group, which must be saved alike for all of its parameters."""
    result = {key: value for key, value in group.items() if key != "params"}
    for key in () if not names else settings[names[0]]:
        keys = [f"optim.param_groups.{name}.{key}" for name in names]
        if key in _MACHINERY or keys[0] not in manifest.values:
            continue
        values = [manifest.values.get(key) for key in keys]
        for name, value in zip(names, values, strict=True):
            if value != values[0]:
                raise CheckpointError(
                    f"parameters of one group must be saved with the same {quote(key)} "
                    f"({quote(names[0])}: {quote(values[0])}, {quote(name)}: {quote(value)}); put "
                    "them in different groups"
                )
        if key in result:
            check_setting(key, values[0], result[key], optimizer.defaults.get(key))
        result[key] = _like(values[0], result.get(key))
    return result


def _like(value: Any, current: Any) -> Any:
    """Return a value with the type of the current one: JSON has no tuples or tensors."""
    if isinstance(current, torch.Tensor):
        return torch.tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value
