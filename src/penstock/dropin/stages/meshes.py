"""The meshes that tensors between stages lie over.

Meshes do not travel. A rank finds its own by the names and the layout of its dimensions, which
travel as plain data.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from penstock.errors import PenstockError
from penstock.torch_private import mesh_layouts

__all__ = [
    "GetMeshCallback",
    "MeshCacheKey",
    "PipeliningMetadataError",
    "PipeliningShapeError",
    "_MeshCache",
    "key_of",
    "read_mesh_layout",
    "write_mesh_layout",
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
        """Remember a mesh."""
        self[key] = mesh

    def update_from_tensors(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Remember the meshes that these tensors lie over."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                self.setdefault(key_of(tensor.device_mesh), tensor.device_mesh)

    def get_mesh(self, key: MeshCacheKey) -> DeviceMesh:
        """Return a mesh that was met before, or what the callback gives."""
        if key not in self:
            ask = self._get_mesh_cb
            mesh = None if ask is None else ask(*key)
            if mesh is None:
                fault = "no get_mesh was given" if ask is None else "get_mesh gave None"
                raise PipeliningMetadataError(
                    f"a DTensor over the mesh dimensions {key[0]} (layout {key[1]}) has come, "
                    f"but {fault}; give the stage a get_mesh that returns this rank's mesh"
                )
            self[key] = mesh
        return self[key]


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
