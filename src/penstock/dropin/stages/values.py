"""Outputs, gradients and what is known of them, on their way into and out of a stage."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor

from penstock.dropin.stages.metadata import (
    TensorMeta,
    _DTensorMeta,
    _MeshCache,
    to_local_if_dtensor,
    validate_metadata,
)
from penstock.errors import PipelineError
from penstock.tensors.packet import cut_off
from penstock.tensors.plain import plain_value
from penstock.torch_private import tree_flatten, tree_unflatten

__all__ = [
    "Gradients",
    "Named",
    "StageUseError",
    "_RecvInfo",
    "_normalize_model_output_as_tuple",
    "as_tuple",
    "compare_with_given",
    "complete_gradient",
    "find_edge",
    "flatten_args",
    "flatten_args_detach",
    "put_in_place",
    "require_tensors",
    "take_buffers",
    "to_send",
]


# Arguments by name, and gradients of values that need not have one.
Named: TypeAlias = dict[str, Any] | None
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


class StageUseError(PipelineError, AssertionError):
    """A stage is asked for something at the wrong time; also an `AssertionError`, as in torch."""


@dataclass(eq=False, repr=False)
class _RecvInfo:
    """One input (or gradient) of a stage: where it comes from, and into what."""

    input_name: str
    source: int | None = None
    buffer: torch.Tensor | None = None
    tensor_meta: TensorMeta | None = None
    _: KW_ONLY
    is_root_arg: bool = False

    def __repr__(self) -> str:
        if self.is_root_arg:
            return f"_RecvInfo({self.input_name}, given by the user)"
        return f"_RecvInfo({self.input_name}, from stage {self.source}, {self.tensor_meta})"


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Return the leaves of a tree; with `detach`, also the tree, detached from its graph."""
    leaves, structure = tree_flatten(args)
    if not detach:
        return leaves
    cut = [cut_off(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(cut, structure), cut


def flatten_args_detach(args: Any) -> Any:
    """Return `flatten_args(args, detach=True)`."""
    return flatten_args(args, detach=True)


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return the values that a module gives back."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


# Runners of other people's import it from torch's module.
_normalize_model_output_as_tuple = as_tuple


def require_tensors(values: Sequence[Any]) -> None:
    """Refuse what cannot go between stages under torch's names."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise StageUseError(f"expected tensor values between stages, got {kind}")


def find_edge(value: Any) -> GradientEdge | None:
    """Return where the gradient of a value enters, if it takes one."""
    if isinstance(value, torch.Tensor):
        return get_gradient_edge(value) if value.requires_grad else None
    return value if isinstance(value, GradientEdge) else None


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain numbers of a tensor, those of its local part if it lies over a mesh."""
    return plain_value(to_local_if_dtensor(tensor, detach=True)).contiguous()


def complete_gradient(gradient: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
    """Return what goes back for an input, placed like it; zeros where nothing has used it."""
    if not value.requires_grad:
        return None
    if gradient is None:
        return torch.zeros_like(value)
    if isinstance(gradient, DTensor) and isinstance(value, DTensor):
        return gradient.redistribute(placements=value.placements)
    return gradient


def take_buffers(infos: Sequence[_RecvInfo], meshes: _MeshCache) -> Gradients:
    """Return what has come, with tensors over a mesh put together."""

    def take(info: _RecvInfo) -> torch.Tensor | None:
        meta, part = info.tensor_meta, info.buffer
        if part is None or not isinstance(meta, _DTensorMeta):
            return part
        return meta.put_together(part.detach(), meshes.get_mesh(meta.mesh_cache_key))

    return tuple(map(take, infos))


def put_in_place(items: list[Any], index: int, item: Any) -> None:
    """Put an item in its place, whatever the order in which items come."""
    items.extend([None] * (index + 1 - len(items)))
    items[index] = item


def compare_with_given(
    place: str, given: Sequence[TensorMeta | None] | None, metas: Sequence[TensorMeta | None]
) -> None:
    """Warn if what the user has said is not what crosses; what crosses is used."""
    for number, (wanted, meta) in enumerate(zip(given or (), metas, strict=False)):
        if wanted is not None and meta is not None:
            # How a tensor lies in memory may change on the way.
            same_stride = replace(wanted, stride=meta.stride)
            validate_metadata(f"{place}[{number}]", same_stride, meta, warn_on_mismatch=True)
