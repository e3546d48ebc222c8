"""What is known of a tensor that crosses between stages, and whether another one is like it.

`_TensorMeta` describes a plain tensor, `_DTensorMeta` one that lies over a mesh: its local part,
and how the whole is put together. Meshes do not travel; they are looked up by the names and the
layout of their dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from penstock.errors import PenstockError
from penstock.torch_private import mesh_layouts

__all__ = [
    "GetMeshCallback",
    "InferenceMode",
    "MeshCacheKey",
    "PipeliningMetadataError",
    "TensorMeta",
    "_DTensorMeta",
    "_MeshCache",
    "_StageMeta",
    "_TensorMeta",
    "_derive_grad_metas",
    "_make_tensor_from_meta",
    "extract_tensor_meta",
    "extract_tensor_metas",
    "put_together",
    "read_mesh_layout",
    "to_local_if_dtensor",
    "write_mesh_layout",
]

# The names of a mesh's dimensions, and their layout (shape and strides, without ranks).
MeshCacheKey: TypeAlias = tuple[tuple[str, ...], Any]


class PipeliningMetadataError(PenstockError, RuntimeError):
    """A tensor at a stage boundary is not what both sides have agreed on."""


class GetMeshCallback(Protocol):
    """Finds or makes the mesh whose dimensions have these names and this layout."""

    def __call__(self, mesh_dim_names: tuple[str, ...], mesh_layout: Any) -> DeviceMesh:
        """Return the mesh on this rank."""


@dataclass(frozen=True, slots=True)
class _TensorMeta:
    """Shape, strides and dtype of a tensor, and whether it asks for a gradient.

    Of a tensor that lies over a mesh these are the local part's.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: torch.Tensor) -> "_TensorMeta":
        """Describe a plain tensor."""
        if isinstance(tensor, DTensor):
            raise PipeliningMetadataError(
                "a DTensor was given for a plain tensor; use _DTensorMeta.from_dtensor"
            )
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    def to_tensor(self, device: torch.device | str) -> torch.Tensor:
        """Return a tensor like this one, not filled."""
        tensor = _make_tensor_from_meta(self, device)
        return tensor.requires_grad_(self.requires_grad and tensor.is_floating_point())

    def get_diff(self, other: "_TensorMeta") -> list[str]:
        """Describe where the two differ; whether a gradient is required does not count."""
        return _differences(self, other, ("shape", "stride", "dtype"))


@dataclass(frozen=True, slots=True)
class _DTensorMeta(_TensorMeta):
    """A tensor over a mesh: besides its local part, the whole's shape and where its parts lie."""

    global_shape: torch.Size = torch.Size()  # noqa: RUF009  # a size is never changed
    global_stride: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    mesh_dim_names: tuple[str, ...] = ()
    mesh_layout: Any = None

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> "_DTensorMeta":
        """Describe a tensor over a mesh."""
        local = dtensor._local_tensor
        names, layout = _key_of(dtensor.device_mesh)
        return _DTensorMeta(
            local.shape,
            local.stride(),
            dtensor.dtype,
            dtensor.requires_grad,
            global_shape=dtensor.shape,
            global_stride=dtensor.stride(),
            placements=tuple(dtensor.placements),
            mesh_dim_names=names,
            mesh_layout=layout,
        )

    @property
    def mesh_cache_key(self) -> MeshCacheKey:
        """The key under which the mesh is looked up."""
        return self.mesh_dim_names, self.mesh_layout

    def to_dtensor(self, device: torch.device | str, mesh: DeviceMesh) -> DTensor:
        """Return a tensor like this one over that mesh, not filled."""
        whole = put_together(_make_tensor_from_meta(self, device), self, mesh)
        whole.requires_grad_(self.requires_grad and whole.is_floating_point())
        return whole

    def get_diff(self, other: _TensorMeta) -> list[str]:
        """Describe where the two differ."""
        if not isinstance(other, _DTensorMeta):
            local = _differences(self, other, ("shape", "stride", "dtype"))
            return [*local, "type mismatch: _DTensorMeta vs _TensorMeta"]
        names = ("shape", "stride", "dtype", "global_shape", "global_stride", "placements")
        return _differences(self, other, (*names, "mesh_dim_names", "mesh_layout"))


TensorMeta: TypeAlias = _TensorMeta | _DTensorMeta


def _differences(one: object, other: object, names: Sequence[str]) -> list[str]:
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in names]
    return [
        f"{name} mismatch: {mine} vs {theirs}" for name, mine, theirs in pairs if mine != theirs
    ]


@dataclass(slots=True)
class _StageMeta:
    """What goes into a stage and comes out of it, forward and backward, as far as is known."""

    inputs: tuple[TensorMeta, ...] | None = None
    outputs: tuple[TensorMeta, ...] | None = None
    input_grads: tuple[TensorMeta | None, ...] | None = None
    output_grads: tuple[TensorMeta | None, ...] | None = None

    def has_any(self) -> bool:
        """Whether anything is known."""
        return any(
            metas is not None
            for metas in (self.inputs, self.outputs, self.input_grads, self.output_grads)
        )

    def has_dtensors(self) -> bool:
        """Whether an input or output lies over a mesh."""
        metas = (*(self.inputs or ()), *(self.outputs or ()))
        return any(isinstance(meta, _DTensorMeta) for meta in metas)

    def is_complete_for_forward(self) -> bool:
        """Whether inputs and outputs are known."""
        return self.inputs is not None and self.outputs is not None


class InferenceMode(Enum):
    """Whether all stages know from the user what crosses their boundaries, or have to find out."""

    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
        """Whether the user's arguments leave something for a stage to find out.

        Gradients of plain tensors are like the tensors; those of DTensors may lie otherwise.
        """
        if not meta.is_complete_for_forward():
            return True
        if not (meta.has_dtensors() and stage_has_backward):
            return False
        return meta.input_grads is None or meta.output_grads is None


def extract_tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """Describe a tensor, plain or over a mesh."""
    match tensor:
        case DTensor():
            return _DTensorMeta.from_dtensor(tensor)
        case _:
            return _TensorMeta.from_tensor(tensor)


def extract_tensor_metas(
    tensors: Sequence[torch.Tensor | None] | None, *, allow_none: bool = False
) -> Any:
    """Describe several tensors; what is None stays None, where that is allowed."""
    if tensors is None:
        return None
    if not allow_none and not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise PipeliningMetadataError(
            "None is among tensors that must all be given; pass allow_none=True to allow it"
        )
    return tuple(
        extract_tensor_meta(tensor) if isinstance(tensor, torch.Tensor) else None
        for tensor in tensors
    )


def to_local_if_dtensor(tensor: torch.Tensor, detach: bool = False) -> torch.Tensor:
    """Return the local part of a tensor over a mesh, or a plain tensor itself."""
    if detach:
        tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _make_tensor_from_meta(meta: _TensorMeta, device: torch.device | str) -> torch.Tensor:
    """Return a plain tensor (or local part) of this shape, layout and dtype, not filled."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)


def put_together(local: torch.Tensor, meta: _DTensorMeta, mesh: DeviceMesh) -> DTensor:
    """Return the tensor over a mesh that a local part belongs to."""
    return DTensor.from_local(
        local,
        mesh,
        meta.placements,
        run_check=False,
        shape=meta.global_shape,
        stride=meta.global_stride,
    )


def _derive_grad_metas(tensor_metas: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    """Return the form of the gradients of these tensors, where the tensors decide it."""
    return tuple(
        None
        if not meta.requires_grad or isinstance(meta, _DTensorMeta)
        else _TensorMeta(meta.shape, meta.stride, meta.dtype, requires_grad=False)
        for meta in tensor_metas
    )


class _MeshCache:
    """The meshes that a stage has met, and a way to get others."""

    def __init__(self, get_mesh_cb: GetMeshCallback | None = None) -> None:
        self._meshes: dict[MeshCacheKey, DeviceMesh] = {}
        self._get_mesh_cb = get_mesh_cb

    def get_mesh(self, key: MeshCacheKey) -> DeviceMesh:
        """Return a mesh that was seen before, or what the callback gives."""
        if key not in self._meshes:
            self._meshes[key] = self._ask(key)
        return self._meshes[key]

    def _ask(self, key: MeshCacheKey) -> DeviceMesh:
        names, layout = key
        mesh = None if self._get_mesh_cb is None else self._get_mesh_cb(names, layout)
        if mesh is None:
            fault = "no get_mesh was given" if self._get_mesh_cb is None else "get_mesh gave None"
            raise PipeliningMetadataError(
                f"a tensor over the mesh dimensions {names} (layout {layout}) has come, but "
                f"{fault}; give the stage a get_mesh that returns this rank's mesh"
            )
        return mesh

    def put(self, key: MeshCacheKey, mesh: DeviceMesh) -> None:
        """Remember a mesh."""
        self._meshes[key] = mesh

    def update_from_tensors(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Remember the meshes that these tensors lie over."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self._meshes.setdefault(_key_of(tensor.device_mesh), tensor.device_mesh)

    def __contains__(self, key: MeshCacheKey) -> bool:
        return key in self._meshes

    def __len__(self) -> int:
        return len(self._meshes)


def _key_of(mesh: DeviceMesh) -> MeshCacheKey:
    return tuple(mesh.mesh_dim_names or ()), mesh._layout


def write_mesh_layout(layout: Any) -> list[Any] | None:
    """Return the layout of a mesh as plain data for another rank."""
    if layout is None:
        return None
    # Up to torch 2.12 a layout is one shape with its strides, then one of each per dimension.
    axes = getattr(layout, "axes", None)
    parts = [layout] if axes is None else axes
    return [axes is not None, [[part.shape, part.stride] for part in parts]]


def read_mesh_layout(plain: list[Any] | None) -> Any:
    """Return the layout that another rank has written."""
    if plain is None:
        return None
    has_axes, parts = plain
    pairs = [(_as_sizes(shape), _as_sizes(stride)) for shape, stride in parts]
    layouts: Any = mesh_layouts
    if not has_axes:
        return layouts._MeshLayout(*pairs[0])
    return layouts._MeshLayout([layouts._FlatLayout(*pair) for pair in pairs])


def _as_sizes(value: Any) -> Any:
    return tuple(map(_as_sizes, value)) if isinstance(value, list) else value
