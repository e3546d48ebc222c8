"""What torch's users see of a tensor that crosses between stages, and what they compare it with.

The transport knows the form of its messages by itself. These values are what stages show in
`_stage_meta`, what users give as examples, and what stages insist on where they are asked to.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from penstock.dropin.stages.meshes import MeshCacheKey, PipeliningMetadataError, key_of

__all__ = [
    "InferenceMode",
    "TensorMeta",
    "_DTensorMeta",
    "_StageBackwardMeta",
    "_StageForwardMeta",
    "_StageMeta",
    "_TensorMeta",
    "_derive_grad_metas",
    "_make_tensor_from_meta",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "to_local_if_dtensor",
    "validate_and_normalize_to_tuple",
    "validate_metadata",
    "validate_static_arg_grad_correspondence",
    "validate_tensors_metadata",
]


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """The form of a tensor, or of the local part of one over a mesh."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> "_TensorMeta":
        """Describe a plain tensor."""
        if isinstance(tensor, DTensor):
            raise PipeliningMetadataError(
                "a plain tensor must be given (got a DTensor); use _DTensorMeta.from_dtensor"
            )
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> torch.Tensor:
        """Return a plain tensor of this form, not filled."""
        tensor = _make_tensor_from_meta(self, device)
        return tensor.requires_grad_(self.requires_grad and tensor.is_floating_point())

    def get_diff(self, other: "_TensorMeta") -> list[str]:
        """Say in which fields the other differs; whether it takes a gradient does not count."""
        found = []
        for name in (field.name for field in fields(self) if field.name != "requires_grad"):
            mine, theirs = getattr(self, name), getattr(other, name, _ABSENT)
            if theirs is not _ABSENT and mine != theirs:
                found.append(f"{name} mismatch: {mine} vs {theirs}")
        if not isinstance(other, type(self)):
            found.append(f"type mismatch: {type(self).__name__} vs {type(other).__name__}")
        return found


# A field that only tensors over a mesh have.
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _DTensorMeta(_TensorMeta):
    """The form of a tensor over a mesh: that of its local part, and how parts make the whole."""

    global_shape: torch.Size = torch.Size()  # noqa: RUF009  # a size is never changed
    global_stride: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_layout: Any = None

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> "_DTensorMeta":
        """Describe a tensor over a mesh."""
        part = dtensor._local_tensor
        local = (part.shape, part.stride(), dtensor.dtype, dtensor.requires_grad)
        whole = (dtensor.shape, dtensor.stride(), tuple(dtensor.placements))
        return _DTensorMeta(*local, *whole, *key_of(dtensor.device_mesh))

    @property
    def mesh_cache_key(self) -> MeshCacheKey:
        """What the mesh is found by."""
        return self.mesh_dim_names, self.mesh_layout

    def put_together(self, part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the tensor of this form over a mesh that a local part belongs to."""
        shape, stride = self.global_shape, self.global_stride
        return DTensor.from_local(
            part, mesh, self.placements, run_check=False, shape=shape, stride=stride
        )

    def to_dtensor(self, device: torch.device | str, mesh: DeviceMesh) -> DTensor:
        """Return a tensor of this form over that mesh, not filled."""
        whole = self.put_together(_make_tensor_from_meta(self, device), mesh)
        whole.requires_grad_(self.requires_grad and whole.is_floating_point())
        return whole


TensorMeta: TypeAlias = _TensorMeta | _DTensorMeta


@dataclass(slots=True)
class _StageMeta:
    """The form of all that crosses the boundaries of a stage, as far as it is known."""

    inputs: tuple[TensorMeta, ...] | None = None
    outputs: tuple[TensorMeta, ...] | None = None
    input_grads: tuple[TensorMeta | None, ...] | None = None
    output_grads: tuple[TensorMeta | None, ...] | None = None

    def has_any(self) -> bool:
        """Whether anything is known."""
        return self != _StageMeta()

    def has_dtensors(self) -> bool:
        """Whether an input or output is over a mesh."""
        metas = (*(self.inputs or ()), *(self.outputs or ()))
        return any(isinstance(meta, _DTensorMeta) for meta in metas)

    def is_complete_for_forward(self) -> bool:
        """Whether inputs and outputs are known."""
        return None not in (self.inputs, self.outputs)


@dataclass(frozen=True, slots=True)
class _StageForwardMeta:
    """The form of a stage's outputs, which ranks learn from the tensors here."""

    forward_metas: tuple[TensorMeta, ...]


@dataclass(frozen=True, slots=True)
class _StageBackwardMeta:
    """The form of the gradients that a stage sends back."""

    backward_metas: tuple[TensorMeta | None, ...]


class InferenceMode(Enum):
    """Whether a stage was given the form of all that crosses, or has to find it out."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
        """Whether something is left to find out, such as where gradients of DTensors lie."""
        if not meta.is_complete_for_forward():
            return True
        is_open = None in (meta.input_grads, meta.output_grads)
        return is_open and stage_has_backward and meta.has_dtensors()


def extract_tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """Describe a tensor, plain or over a mesh."""
    if not isinstance(tensor, DTensor):
        return _TensorMeta.from_tensor(tensor)
    return _DTensorMeta.from_dtensor(tensor)


def extract_tensor_metas(
    tensors: Sequence[torch.Tensor | None] | None, *, allow_none: bool = False
) -> Any:
    """Describe tensors one by one; None for None, where that is allowed."""
    if tensors is None:
        return None
    if not allow_none and any(tensor is None for tensor in tensors):
        raise PipeliningMetadataError(
            "every tensor must be given (got None among them); pass allow_none=True to allow it"
        )
    return tuple(None if tensor is None else extract_tensor_meta(tensor) for tensor in tensors)


def _derive_grad_metas(tensor_metas: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Return the form of each gradient, where it follows from that of its tensor."""
    return tuple(
        replace(meta, requires_grad=False)
        if meta.requires_grad and not isinstance(meta, _DTensorMeta)
        else None
        for meta in tensor_metas
    )


def to_local_if_dtensor(tensor: torch.Tensor, detach: bool = False) -> torch.Tensor:
    """Return the local part of a tensor over a mesh, or a plain tensor itself."""
    value = tensor.detach() if detach else tensor
    return value.to_local() if isinstance(value, DTensor) else value


def _make_tensor_from_meta(meta: _TensorMeta, device: torch.device | str) -> torch.Tensor:
    """Return a plain tensor or a local part of this form, not filled."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> Any:
    """Return a tensor, or a tuple or list of tensors, as a tuple; refuse anything else."""
    if args is None:
        return None
    items = args if isinstance(args, tuple | list) else (args,)
    for number, item in enumerate(items):
        if not isinstance(item, torch.Tensor) and not (allow_none and item is None):
            raise PipeliningMetadataError(
                f"value {number} of a stage is of type {type(item).__name__}, not a tensor; give "
                "a tensor, or a tuple or list of them, and pass other values as keywords"
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
    """Compare tensors one by one; their number must agree, and None be where it was expected."""
    reports = {"raise_on_mismatch": raise_on_mismatch, "warn_on_mismatch": warn_on_mismatch}
    if len(expected) != len(actual):
        text = f"{len(actual)} tensors where {len(expected)} were expected"
        return _report(desc, [text], *reports.values())
    found = []
    for number, (meta, value) in enumerate(zip(expected, actual, strict=True)):
        place = f"{desc}[{number}]"
        if meta is not None and value is not None:
            found += validate_metadata(place, meta, value, **reports)
        elif meta is not value:
            words = ["nothing" if one is None else "a tensor" for one in (value, meta)]
            text = f"{words[0]} where {words[1]} was expected"
            found += _report(place, [text], *reports.values())
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
    """Refuse example gradients that do not fit the example tensors that they belong to."""
    kind = "input" if is_input else "output"
    name = f"stage {stage_index}: {kind}_grads"
    if len(args) != len(grads):
        raise PipeliningMetadataError(
            f"{name} has {len(grads)} entries for {len(args)} of {kind}_args; give one for each, "
            "None for a tensor without a gradient"
        )
    for number, (tensor, grad) in enumerate(zip(args, grads, strict=True)):
        place = f"{name}[{number}]"
        if grad is None and tensor.requires_grad:
            text = f"{place} is None for a tensor that requires a gradient; is one missing?"
            warnings.warn(text, UserWarning, stacklevel=3)
        elif grad is not None and not tensor.requires_grad:
            raise PipeliningMetadataError(
                f"{place} must be None for a tensor that requires no gradient (got a tensor)"
            )
        elif grad is not None and isinstance(tensor, DTensor) and not isinstance(grad, DTensor):
            raise PipeliningMetadataError(
                f"{place} must be a DTensor, as its tensor is (got {type(grad).__name__})"
            )
