"""Where the parts of a checkpoint go in this process: model, optimizer and generators."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from penstock.checkpoint.content import generator_states, name_parameters
from penstock.checkpoint.manifest import Manifest, SavedTensor
from penstock.errors import CheckpointError
from penstock.training.pipeline import Pipeline
from penstock.untrusted import quote

__all__ = [
    "OptimizerPart",
    "Targets",
    "check_names",
    "generator_targets",
    "model_targets",
    "optimizer_part",
]

# How many names an error lists.
_LISTED = 5
# Settings of an optimizer that select an implementation.
_MACHINERY = frozenset({"capturable", "differentiable", "foreach", "fused"})
# The key to read, and the tensor to read it into; by names of their own.
Targets: TypeAlias = dict[str, tuple[str, torch.Tensor]]


def model_targets(manifest: Manifest, pipeline: Pipeline) -> Targets:
    """Return this process's parameters and buffers, each with the key to read."""
    targets: Targets = {}
    for name, tensor in pipeline.state_dict().items():
        key = f"model.{_saved_name(manifest, pipeline, name)}"
        if key not in manifest.tensors:
            raise CheckpointError(
                f"the checkpoint must have {name} of shape {list(tensor.shape)} (it has "
                f"{_some(_model_names(manifest))}); load it into the model that saved it"
            )
        shape = manifest.tensors[key].shape
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} must have the shape {quote(list(shape))} that was saved (got "
                f"{list(tensor.shape)})"
            )
        targets[f"model.{name}"] = key, tensor
    return targets


def check_names(manifest: Manifest, pipeline: Pipeline, held: Iterable[Sequence[str]]) -> None:
    """Refuse a checkpoint with names that no process of the model holds."""
    known = {_saved_name(manifest, pipeline, name) for name in chain.from_iterable(held)}
    if extra := [name for name in _model_names(manifest) if name not in known]:
        raise CheckpointError(
            f"the model must have every name of the checkpoint (it lacks {_some(extra)}; there "
            f"are {len(_model_names(manifest))} parameters and buffers in it)"
        )


def _model_names(manifest: Manifest) -> list[str]:
    return sorted(
        key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")
    )


def _saved_name(manifest: Manifest, pipeline: Pipeline, name: str) -> str:
    """Return the name under which a parameter was saved, which may be another of its names."""
    shared = pipeline.shared_names
    same = [name, shared.get(name, name)]
    same += [other for other, first in shared.items() if first == same[1]]
    for candidate in same:
        if f"model.{candidate}" in manifest.tensors:
            return candidate
        if candidate in manifest.aliases:
            return manifest.aliases[candidate]
    return name


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(map(quote, names[:_LISTED]))
    return f"{listed} and {len(names) - _LISTED} more" if len(names) > _LISTED else listed


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """The future state of this process's optimizer; its tensors are still to be read.

    `exact` has the parameters that have the type with which they were saved, by number.
    """

    optimizer: torch.optim.Optimizer
    state: dict[int, dict[str, Any]]
    groups: list[dict[str, Any]]
    targets: Targets
    exact: dict[int, torch.Tensor]

    def apply(self) -> None:
        """Give the state to the optimizer; torch moves it to the devices of its parameters."""
        self.optimizer.load_state_dict({"state": self.state, "param_groups": self.groups})
        # Torch casts state to the type of its parameter, which not all of it had.
        for number, parameter in self.exact.items():
            kept = self.optimizer.state[parameter]
            for key, value in self.state[number].items():
                if isinstance(value, torch.Tensor):
                    kept[key] = value.to(kept[key].device)


def optimizer_part(
    manifest: Manifest, pipeline: Pipeline, optimizer: torch.optim.Optimizer
) -> OptimizerPart:
    """Return what the checkpoint has for the parameters of this optimizer."""
    names = {
        parameter: _saved_name(manifest, pipeline, name)
        for parameter, name in name_parameters(pipeline, optimizer).items()
    }
    kept = _by_parameter("optim.state.", [*manifest.tensors, *manifest.values])
    settings = _by_parameter("optim.param_groups.", [*manifest.tensors, *manifest.values])
    if not settings:
        raise CheckpointError(
            "the checkpoint must have the state of an optimizer (it was saved without one); load "
            "it without the optimizer"
        )
    part = OptimizerPart(optimizer, {}, [], {}, {})
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
            part.state[number] = {
                key: _state_value(manifest, f"optim.state.{name}.{key}", parameter, part.targets)
                for key in kept.get(name, ())
            }
        own = [names[parameter] for parameter in group["params"]]
        part.groups.append({**_group_settings(manifest, group, own, settings), "params": numbers})
    return part


def _by_parameter(prefix: str, keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the last words of keys with this prefix, by parameter."""
    found: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, []).append(last)
    return found


def _state_value(manifest: Manifest, key: str, parameter: torch.Tensor, targets: Targets) -> Any:
    """Return a plain value, or memory for a tensor, which becomes a target."""
    if key in manifest.values:
        return manifest.values[key]
    target = _memory(manifest.tensors[key], key, parameter)
    # A parameter that is held twice has two states, which are read from one key.
    targets[f"{key}.{len(targets)}"] = key, target
    return target


def _memory(saved: SavedTensor, key: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return memory for optimizer state, sharded like its parameter if that has its shape."""
    if not isinstance(parameter, DTensor) or not saved.shape:
        return torch.empty(saved.shape, dtype=saved.torch_dtype)
    if saved.shape != tuple(parameter.shape):
        raise CheckpointError(
            f"{quote(key)} must have the shape {list(parameter.shape)} of its sharded parameter "
            f"(got {quote(list(saved.shape))}); load it where the parameter is not sharded"
        )
    return torch.empty_like(parameter, dtype=saved.torch_dtype)


def _group_settings(
    manifest: Manifest,
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
        result[key] = _like(values[0], result.get(key))
    return result


def _like(value: Any, current: Any) -> Any:
    """Return a value with the type of the current one: JSON has no tuples or tensors."""
    if isinstance(current, torch.Tensor):
        return torch.tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value


def generator_targets(manifest: Manifest, pipeline: Pipeline, rank: int) -> Targets:
    """Return memory for the states of torch's generators, if they were saved for this rank."""
    targets: Targets = {}
    for device, state in generator_states(pipeline).items():
        key = f"random.{rank}.{device}"
        if key in manifest.tensors and manifest.tensors[key].shape == tuple(state.shape):
            targets[key] = key, torch.empty_like(state)
    return targets
