"""Which saved tensors this process's parameters, buffers and generators are read from."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch

from penstock.checkpoint.content import generator_states
from penstock.checkpoint.host_memory import host_memory
from penstock.checkpoint.loading.reading import Target
from penstock.checkpoint.manifest import Manifest
from penstock.checkpoint.parts import local_box
from penstock.errors import CheckpointError
from penstock.training.pipeline import Pipeline
from penstock.untrusted import quote

__all__ = ["check_names", "generator_targets", "model_targets", "saved_names", "target_like"]

# How many names an error lists.
_LISTED = 5


def target_like(manifest: Manifest, key: str, tensor: torch.Tensor) -> Target:
    """Return host memory for this process's part of a tensor, in the type that was saved."""
    box = local_box(tensor)
    return Target(key, box, host_memory(box.sizes, manifest.tensors[key].torch_dtype))


def model_targets(manifest: Manifest, pipeline: Pipeline) -> list[tuple[torch.Tensor, Target]]:
    """Return this process's parameters and buffers, each with memory for its future numbers."""
    state = pipeline.state_dict()
    names = saved_names(manifest, pipeline, state)
    found = []
    for name, tensor in state.items():
        key = f"model.{names[name]}"
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
        saved = manifest.tensors[key].torch_dtype
        if saved.is_complex and not tensor.is_complex():
            raise CheckpointError(f"{name} must be complex, as it was saved (got {tensor.dtype})")
        found.append((tensor, target_like(manifest, key, tensor)))
    return found


def check_names(manifest: Manifest, pipeline: Pipeline, held: Iterable[Sequence[str]]) -> None:
    """Refuse a checkpoint with names that no process of the model holds."""
    known = set(saved_names(manifest, pipeline, chain.from_iterable(held)).values())
    if extra := [name for name in _model_names(manifest) if name not in known]:
        raise CheckpointError(
            f"the model must have every name of the checkpoint (it lacks {_some(extra)}; there "
            f"are {len(_model_names(manifest))} parameters and buffers in it)"
        )


def saved_names(manifest: Manifest, pipeline: Pipeline, names: Iterable[str]) -> dict[str, str]:
    """Return the names under which parameters were saved, which may be others of their names."""
    shared = pipeline.shared_names
    others: dict[str, list[str]] = {}
    for other, first in shared.items():
        others.setdefault(first, []).append(other)
    found = {}
    for name in names:
        first = shared.get(name, name)
        candidates = (name, first, *others.get(first, ()))
        found[name] = next(filter(None, (_saved(manifest, c) for c in candidates)), name)
    return found


def _saved(manifest: Manifest, name: str) -> str | None:
    return name if f"model.{name}" in manifest.tensors else manifest.aliases.get(name)


def _model_names(manifest: Manifest) -> list[str]:
    return sorted(
        key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")
    )


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(map(quote, names[:_LISTED]))
    return f"{listed} and {len(names) - _LISTED} more" if len(names) > _LISTED else listed


def generator_targets(manifest: Manifest, pipeline: Pipeline, rank: int) -> dict[str, Target]:
    """Return memory for the states of torch's generators, by device, if all of them were saved.

    Another version of torch may have states of another length, which then stay unchanged.
    """
    current: Mapping[str, torch.Tensor] = generator_states(pipeline)
    keys = {device: f"random.{rank}.{device}" for device in current}
    for device, key in keys.items():
        saved = manifest.tensors.get(key)
        if saved is None or saved.shape != tuple(current[device].shape):
            return {}
    return {device: target_like(manifest, key, current[device]) for device, key in keys.items()}
