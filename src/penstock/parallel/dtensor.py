"""Tensors over a mesh (`DTensor`) at a stage boundary: sent as a local part and a layout.

Each rank of a stage's mesh sends its part to the rank with the same coordinates in the next
stage's mesh. There it is put on the mesh whose dimensions have the same names. Autograd undoes
both, so that gradients are sent as local parts too.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from penstock.errors import BoundaryError
from penstock.tensors.tree import Structure
from penstock.torch_private import mesh_layouts

__all__ = [
    "Meshes",
    "as_whole",
    "own_part",
    "read_mesh_layout",
    "read_placement",
    "spread",
    "take_local_parts",
    "write_mesh_layout",
    "write_placement",
]

# The names of a mesh's dimensions, the placement on each, and the whole shape and strides.
Layout: TypeAlias = tuple[list[str], list[str], list[int], list[int]]


def as_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole value of a tensor, for example of a loss, on every rank of its mesh."""
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: its local part, or a plain tensor itself."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def spread(
    part: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Return the tensor over a mesh, of this shape as a whole, that a local part belongs to."""
    whole: DTensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return whole


def take_local_parts(
    structure: Structure, tensors: list[torch.Tensor]
) -> tuple[Structure, list[torch.Tensor]]:
    """Replace tensors over a mesh by their local parts; the structure gets their layouts."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return structure, tensors
    layouts = [_layout(t) if isinstance(t, DTensor) else None for t in tensors]
    return ["m", layouts, structure], [own_part(tensor) for tensor in tensors]


class Meshes:
    """The meshes of a stage's parameters, found by the names of their dimensions."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: dict[tuple[str, ...], DeviceMesh] = {}

    def put_back(
        self, structure: Structure, tensors: Sequence[torch.Tensor]
    ) -> tuple[Structure, Sequence[torch.Tensor]]:
        """Undo `take_local_parts` of another rank, on this stage's own mesh."""
        match structure:
            case ["m", layouts, inner]:
                pairs = zip(tensors, layouts, strict=True)
                return inner, [self._spread(t, layout) if layout else t for t, layout in pairs]
            case _:
                return structure, tensors

    def _spread(self, part: torch.Tensor, layout: Layout) -> torch.Tensor:
        names, placements, shape, stride = layout
        mesh = self._find(tuple(names))
        return spread(part, mesh, [read_placement(text) for text in placements], shape, stride)

    def _find(self, names: tuple[str, ...]) -> DeviceMesh:
        if names not in self._found:
            self._found[names] = self._search(names)
        return self._found[names]

    def _search(self, names: tuple[str, ...]) -> DeviceMesh:
        meshes = [p.device_mesh for p in self._module.parameters() if isinstance(p, DTensor)]
        for mesh in meshes:
            if mesh.mesh_dim_names == names:
                return mesh
        for mesh in meshes:
            root = mesh._get_root_mesh()
            if set(names) <= set(root.mesh_dim_names or ()):
                return root[names]
        raise BoundaryError(
            f"a stage that gets a tensor over the mesh dimensions {names} must have a parameter "
            "over them (got none); parallelize one of its layers, or send a whole tensor"
        )


def _layout(tensor: DTensor) -> Layout:
    names = tensor.device_mesh.mesh_dim_names
    if names is None:
        raise BoundaryError(
            "a tensor that crosses a boundary must be on a mesh with named dimensions (got no "
            "names); give init_device_mesh(mesh_dim_names=...)"
        )
    placements = [write_placement(placement) for placement in tensor.placements]
    return list(names), placements, list(tensor.shape), list(tensor.stride())


def write_placement(placement: Placement) -> str:
    """Return how a tensor is placed over one dimension of a mesh, as text for another rank."""
    if type(placement) is Replicate:
        return "replicate"
    if type(placement) is Shard:
        return f"shard {placement.dim}"
    if type(placement) is Partial:
        return f"partial {placement.reduce_op}"
    raise BoundaryError(
        f"a tensor with the placement {placement} cannot cross a stage boundary; redistribute it"
    )


def read_placement(text: str) -> Placement:
    """Return the placement that another rank has written."""
    match text.split():
        case ["replicate"]:
            return Replicate()
        case ["shard", dim]:
            return Shard(int(dim))
        case ["partial", operation]:
            return Partial(operation)
        case _:
            raise BoundaryError(f"not a valid placement: {text!r}")


def write_mesh_layout(layout: Any) -> list[Any]:
    """Return the layout of a mesh as plain data for another rank."""
    # Up to torch 2.12 a layout is one shape with its strides, then one of each per dimension.
    axes = getattr(layout, "axes", None)
    parts = [layout] if axes is None else axes
    return [axes is not None, [[part.shape, part.stride] for part in parts]]


def read_mesh_layout(plain: list[Any]) -> Any:
    """Return the layout that another rank has written."""
    has_axes, parts = plain
    pairs = [(_as_sizes(shape), _as_sizes(stride)) for shape, stride in parts]
    layouts: Any = mesh_layouts
    if not has_axes:
        return layouts._MeshLayout(*pairs[0])
    return layouts._MeshLayout([layouts._FlatLayout(*pair) for pair in pairs])


def _as_sizes(value: Any) -> Any:
    return tuple(map(_as_sizes, value)) if isinstance(value, list) else value
