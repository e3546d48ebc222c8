"""What torch's users see of a tensor that crosses between stages, and what they compare it with.

The transport knows the form of its messages by itself. Meshes do not travel: a rank finds its own
by the names and the layout of its dimensions, which travel as plain data.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from penstock.errors import PenstockError
from penstock.parallel.dtensor import own_part, spread

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "MeshCacheKey",
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
    "to_local_if_dtensor",
    "validate_metadata",
    "validate_tensors_metadata",
]


# The names of a mesh's dimensions, and their layout (shape and strides, without ranks).
MeshCacheKey: TypeAlias = tuple[tuple[str, ...], Any]


class PipeliningMetadataError(PenstockError, RuntimeError):
    """A tensor at a stage boundary is not what both sides have agreed on."""


# The name that the error had up to torch 2.11.
PipeliningShapeError = PipeliningMetadataError


class GetMeshCallback(Protocol):
    """Finds or makes the mesh whose dimensions have these names and this layout."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> DeviceMesh:
        """Return the mesh on this rank."""


def key_of(mesh: DeviceMesh) -> MeshCacheKey:
    """Return what a mesh is found by."""
    return tuple(mesh.mesh_dim_names or ()), mesh._layout


class _MeshCache(dict[MeshCacheKey, DeviceMesh]):
    """The meshes that a stage has met, and a way to get others."""

    def __init__(self, get_mesh_cb: GetMeshCallback | None = None) -> None:
        super().__init__()
        self._get_mesh_cb = get_mesh_cb

    def put(self, key: MeshCacheKey, mesh: DeviceMesh) -> None:
        self[key] = mesh

    def update_from_tensors(self, tensors: Sequence[torch.Tensor | None]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self.setdefault(key_of(tensor.device_mesh), tensor.device_mesh)

    def get_mesh(self, key: MeshCacheKey) -> DeviceMesh:
        if key not in self:
            ask = self._get_mesh_cb
            mesh = None if ask is None else ask(*key)
            if mesh is None:
                fault = "no get_mesh was given" if ask is None else "get_mesh gave None"
                raise PipeliningMetadataError(
                    f"a DTensor over the mesh dimensions {key[0]} (layout {key[1]}) has come, but "
                    f"{fault}; give the stage a get_mesh that returns this rank's mesh"
                )
            self[key] = mesh
        return self[key]


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """The form of a tensor, or of the local part of one over a mesh."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> "_TensorMeta":
        if isinstance(tensor, DTensor):
            raise PipeliningMetadataError("a DTensor is described by _DTensorMeta.from_dtensor")
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> torch.Tensor:
        tensor = _make_tensor_from_meta(self, device)
        return tensor.requires_grad_(self.requires_grad and tensor.is_floating_point())

    def get_diff(self, other: "_TensorMeta") -> list[str]:
        """Say in which fields the other differs; whether it takes a gradient does not count."""
        names = [field.name for field in fields(self) if field.name != "requires_grad"]
        # Some fields are those of tensors over a mesh alone.
        values = [(n, getattr(self, n), getattr(other, n)) for n in names if hasattr(other, n)]
        found = [f"{name} mismatch: {mine} vs {its}" for name, mine, its in values if mine != its]
        return found if isinstance(other, type(self)) else [*found, _differ_in_type(self, other)]


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
        part = dtensor._local_tensor
        local = (part.shape, part.stride(), dtensor.dtype, dtensor.requires_grad)
        whole = (dtensor.shape, dtensor.stride(), tuple(dtensor.placements))
        return _DTensorMeta(*local, *whole, *key_of(dtensor.device_mesh))

    @property
    def mesh_cache_key(self) -> MeshCacheKey:
        return self.mesh_dim_names, self.mesh_layout

    def put_together(self, part: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the tensor of this form over a mesh that a local part belongs to."""
        return spread(part, mesh, self.placements, self.global_shape, self.global_stride)

    def to_dtensor(self, device: torch.device | str, mesh: DeviceMesh) -> DTensor:
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
        return self != _StageMeta()

    def has_dtensors(self) -> bool:
        metas = (*(self.inputs or ()), *(self.outputs or ()))
        return any(isinstance(meta, _DTensorMeta) for meta in metas)

    def is_complete_for_forward(self) -> bool:
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
    plain = _TensorMeta.from_tensor
    return _DTensorMeta.from_dtensor(tensor) if isinstance(tensor, DTensor) else plain(tensor)


def extract_tensor_metas(
    tensors: Sequence[torch.Tensor | None] | None, *, allow_none: bool = False
) -> Any:
    """Describe tensors one by one; None for None, where that is allowed."""
    if tensors is None:
        return None
    if not allow_none and any(tensor is None for tensor in tensors):
        raise PipeliningMetadataError("every tensor must be given (got None among them)")
    return tuple(None if tensor is None else extract_tensor_meta(tensor) for tensor in tensors)


def _derive_grad_metas(tensor_metas: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Return the form of each gradient, where it follows from that of its tensor."""

    def derive(meta: TensorMeta) -> TensorMeta | None:
        is_known = meta.requires_grad and not isinstance(meta, _DTensorMeta)
        return replace(meta, requires_grad=False) if is_known else None

    return tuple(map(derive, tensor_metas))


def to_local_if_dtensor(tensor: torch.Tensor, detach: bool = False) -> torch.Tensor:
    """Return the local part of a tensor over a mesh, or a plain tensor itself."""
    return own_part(tensor.detach() if detach else tensor)


def _make_tensor_from_meta(meta: _TensorMeta, device: torch.device | str) -> torch.Tensor:
    """Return a plain tensor or a local part of this form, not filled."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


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
    is_alike = type(expected) is type(meta)
    found = expected.get_diff(meta) if is_alike else [_differ_in_type(expected, meta)]
    return _report(desc, found, raise_on_mismatch, warn_on_mismatch)


def _differ_in_type(expected: _TensorMeta, actual: _TensorMeta) -> str:
    return f"type mismatch: {type(expected).__name__} vs {type(actual).__name__}"


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
        return _report(desc, [text], raise_on_mismatch, warn_on_mismatch)
    found = []
    for number, (meta, value) in enumerate(zip(expected, actual, strict=True)):
        place = f"{desc}[{number}]"
        if meta is not None and value is not None:
            found += validate_metadata(place, meta, value, **reports)
        elif meta is not value:
            text = "nothing where a tensor" if value is None else "a tensor where nothing"
            text = f"{text} was expected"
            found += _report(place, [text], raise_on_mismatch, warn_on_mismatch)
    return found


def _report(desc: str, found: list[str], raises: bool, warns: bool) -> list[str]:
    if found and raises:
        raise PipeliningMetadataError(f"{desc}: {'; '.join(found)}")
    if found and warns:
        text = f"{desc}: Metadata mismatch: {'; '.join(found)}; what really comes is used"
        warnings.warn(text, UserWarning, stacklevel=3)
    return found
