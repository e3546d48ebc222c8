"""Helpers under the names that users of `torch.distributed.pipelining._utils` import."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from penstock.dropin.stages.metadata import (
    GetMeshCallback,
    InferenceMode,
    MeshCacheKey,
    PipeliningMetadataError,
    TensorMeta,
    _derive_grad_metas,
    _DTensorMeta,
    _make_tensor_from_meta,
    _MeshCache,
    _StageMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
)
from penstock.errors import ArgumentError
from penstock.ir.placement import Placement
from penstock.torch_private import tree_flatten, tree_unflatten

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "MeshCacheKey",
    "PipeInfo",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "TensorMeta",
    "_DTensorMeta",
    "_MeshCache",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_StageMeta",
    "_TensorMeta",
    "_derive_grad_metas",
    "_make_tensor_from_meta",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "flatten_args",
    "flatten_args_detach",
    "generate_rank_to_stage_mapping",
    "generate_stage_to_rank_mapping",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]

# The name that the error had up to torch 2.11.
PipeliningShapeError = PipeliningMetadataError


@dataclass(frozen=True, slots=True)
class _StageForwardMeta:
    """The form of a stage's outputs for the next stage; ranks here learn it from tensors."""

    forward_metas: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True)
class _StageBackwardMeta:
    """The metadata of the gradients that a stage sends to the stage before it."""

    backward_metas: tuple[TensorMeta | None, ...]


@dataclass(slots=True)
class PipeInfo:
    """What a stage has to know of the pipe that it was cut from."""

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool


def generate_stage_to_rank_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, int]:
    """Return the rank of each stage: round-robin ("loop"), or down the ranks and back ("v")."""
    match style:
        case "loop":
            holders = [stage % pp_size for stage in range(num_stages)]
        case "v" if num_stages % pp_size:
            raise ArgumentError(
                f"a v places the same number of stages on every rank (stages: {num_stages}, "
                f"ranks: {pp_size}); use a multiple of {pp_size} stages"
            )
        case "v":
            holders = list(Placement.v(pp_size, num_stages // pp_size).rank_of_stage)
        case _:
            raise ArgumentError(f'stages are placed in style "loop" or "v" (got {style!r})')
    return dict(enumerate(holders))


def generate_rank_to_stage_mapping(
    pp_size: int, num_stages: int, style: str = "loop"
) -> dict[int, list[int]]:
    """Return the stages that each rank holds, in rising order."""
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages


def flatten_args(args: Any, *, detach: bool = False) -> Any:
    """Return the leaves of a tree; with `detach`, also the tree, detached from its graph."""
    leaves, structure = tree_flatten(args)
    if not detach:
        return leaves
    cut = [_cut(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(cut, structure), cut


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def flatten_args_detach(args: Any) -> Any:
    """Return `flatten_args(args, detach=True)`."""
    return flatten_args(args, detach=True)


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> Any:
    """Return a tensor, or a tuple or list of tensors, as a tuple; refuse anything else."""
    if args is None:
        return None
    items = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(items, tuple | list):
        raise PipeliningMetadataError(
            f"a stage takes and returns tensors, or tuples or lists of them (got "
            f"{type(args).__name__}); pass other values as keyword arguments"
        )
    for number, item in enumerate(items):
        if not isinstance(item, torch.Tensor) and not (allow_none and item is None):
            raise PipeliningMetadataError(
                f"value {number} of a stage is of type {type(item).__name__}, not a tensor; pass "
                "other values as keyword arguments"
            )
    return tuple(items)


def validate_metadata(
    desc: str,
    expected: TensorMeta,
    actual: torch.Tensor | TensorMeta,
    *,
    raise_on_mismatch: bool = False,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Return how a tensor differs from what was expected; raise or warn if asked to."""
    meta = extract_tensor_meta(actual) if isinstance(actual, torch.Tensor) else actual
    if type(expected) is type(meta):
        found = expected.get_diff(meta)
    else:
        found = [f"type mismatch: {type(expected).__name__} vs {type(meta).__name__}"]
    return _report(desc, found, raise_on_mismatch, warn_on_mismatch)


def validate_tensors_metadata(
    desc: str,
    expected: Sequence[TensorMeta | None],
    actual: Sequence[torch.Tensor | TensorMeta | None],
    *,
    raise_on_mismatch: bool = True,
    warn_on_mismatch: bool = False,
) -> list[str]:
    """Compare several tensors; their number must agree, and None be where it was expected."""
    if len(expected) != len(actual):
        found = [f"{len(actual)} tensors where {len(expected)} were expected"]
        return _report(desc, found, raise_on_mismatch, warn_on_mismatch)
    found = []
    for number, (meta, value) in enumerate(zip(expected, actual, strict=True)):
        place = f"{desc}[{number}]"
        if meta is None or value is None:
            if meta is not value:
                wrong = "nothing" if value is None else "a tensor"
                right = "nothing" if meta is None else "a tensor"
                text = [f"{wrong} where {right} was expected"]
                found += _report(place, text, raise_on_mismatch, warn_on_mismatch)
            continue
        found += validate_metadata(
            place,
            meta,
            value,
            raise_on_mismatch=raise_on_mismatch,
            warn_on_mismatch=warn_on_mismatch,
        )
    return found


def _report(desc: str, found: list[str], raises: bool, warns: bool) -> list[str]:
    if found and raises:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(found)}")
    if found and warns:
        text = f"{desc}: Metadata mismatch: {'; '.join(found)}; what really comes is used"
        warnings.warn(text, UserWarning, stacklevel=3)
    return found


def validate_static_arg_grad_correspondence(
    stage_index: int,
    args: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    is_input: bool,
) -> None:
    """Check that example gradients fit the example tensors that they belong to."""
    kind = "input" if is_input else "output"
    place = f"stage {stage_index}: {kind}_grads"
    if len(args) != len(grads):
        raise PipeliningMetadataError(
            f"{place} has {len(grads)} entries for {len(args)} of {kind}_args; give one for each, "
            "None for a tensor without a gradient"
        )
    for number, (tensor, grad) in enumerate(zip(args, grads, strict=True)):
        _check_pair(f"{place}[{number}]", tensor, grad)


def _check_pair(place: str, tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is None:
        if tensor.requires_grad:
            text = f"{place} is None for a tensor that requires a gradient; is one missing?"
            warnings.warn(text, UserWarning, stacklevel=4)
    elif not tensor.requires_grad:
        raise PipeliningMetadataError(
            f"{place} is a {type(grad).__name__} for a tensor that requires no gradient; give None"
        )
    elif isinstance(tensor, DTensor) and not isinstance(grad, DTensor):
        raise PipeliningMetadataError(
            f"{place} is a {type(grad).__name__} for a DTensor; its gradient is a DTensor too"
        )
