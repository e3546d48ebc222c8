"""A batch into microbatches and back, leaf by leaf, as its chunk specs say.

Without specs, tensors and block masks are split along dimension 0, and the rest is replicated.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.errors import BatchError
from penstock.parallel.dtensor import own_part, spread
from penstock.step.microbatches import share_out
from penstock.tensors.block_masks import BlockMask, has_rows, split_mask
from penstock.torch_private import tree_flatten, tree_map, tree_unflatten

__all__ = [
    "DEFAULT_CHUNK_DIM",
    "MixedChunksError",
    "TensorChunkSpec",
    "_CustomReducer",
    "_LossReducer",
    "_Replicate",
    "_shard_dict_of_args",
    "_split_block_mask",
    "_split_tensor",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]

DEFAULT_CHUNK_DIM = 0


class MixedChunksError(BatchError, AssertionError):
    """Chunks cannot be made or merged; also an `AssertionError`, which torch's users expect."""


class TensorChunkSpec:
    """Split along this dimension."""

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> Any:
        """Return specs for positional arguments, from their dimensions."""
        return tree_map(TensorChunkSpec, chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> Any:
        """Return specs for keyword arguments, from their dimensions."""
        return tree_map(TensorChunkSpec, chunk_dims)


class _Replicate:
    """Give the whole value to every microbatch."""


class _CustomReducer:
    """Merge one output of all microbatches by a function of two values, from a first value on."""

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.reduce_fn, self.init_value = reduce_fn, init_value


class _LossReducer(_CustomReducer):
    """Merge losses."""


sum_reducer = _LossReducer(torch.tensor(0.0), operator.add)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split arguments into `chunks` microbatches, or fewer where a tensor has too few rows."""
    tree = tuple(args), kwargs or {}
    pairs = [*_pair_up(tree[0], args_chunk_spec), *_pair_up(tree[1], kwargs_chunk_spec)]
    num_chunks = min([chunks, *(_most_chunks(value, spec, chunks) for value, spec in pairs)])
    columns = [_split_leaf(value, spec, num_chunks) for value, spec in pairs]
    structure = tree_flatten(tree, is_leaf=_is_mask)[1]
    parts = [
        tree_unflatten([column[n] for column in columns], structure) for n in range(num_chunks)
    ]
    return [positional for positional, _ in parts], [named for _, named in parts]


def _shard_dict_of_args(
    args_dict: Mapping[Any, Any], args_chunk_spec: Mapping[Any, Any], num_chunks: int
) -> list[dict[Any, Any]]:
    specs = None, dict(args_chunk_spec)
    return split_args_kwargs_into_chunks((), dict(args_dict), num_chunks, *specs)[1]


def _is_mask(value: object) -> bool:
    return isinstance(value, BlockMask)


def _pair_up(tree: Any, spec: Any) -> list[tuple[Any, Any]]:
    """Return each leaf of the arguments with its spec."""
    leaves = tree_flatten(tree, is_leaf=_is_mask)[0]
    if spec is None:
        return [(leaf, _default_spec(leaf)) for leaf in leaves]
    if isinstance(tree, Mapping):
        if set(tree) != set(spec):
            raise MixedChunksError(
                f"keyword arguments {sorted(tree)} and their chunk specs {sorted(spec)} differ; "
                "give a spec for each, _Replicate() for what is not split"
            )
        # The order of a spec's names need not be that of the arguments.
        spec = {name: spec[name] for name in tree}
    specs = tree_flatten(spec if isinstance(spec, Mapping) else tuple(spec))[0]
    if len(specs) != len(leaves):
        raise MixedChunksError(
            f"{len(leaves)} values have {len(specs)} chunk specs; give one for each"
        )
    return list(zip(leaves, specs, strict=True))


def _default_spec(leaf: Any) -> Any:
    is_split = leaf.dim() > 0 if isinstance(leaf, torch.Tensor) else _is_mask(leaf)
    return TensorChunkSpec(DEFAULT_CHUNK_DIM) if is_split else _Replicate()


def _most_chunks(value: Any, spec: Any, chunks: int) -> int:
    """Return the largest number of chunks that a value can be split into."""
    if spec is _Replicate or isinstance(spec, _Replicate):
        return chunks
    match value, spec:
        case torch.Tensor(), TensorChunkSpec():
            return value.size(spec.split_dim)
        case BlockMask(), TensorChunkSpec(split_dim=0):
            return value.kv_num_blocks.size(0) if has_rows(value) else chunks
        case BlockMask(), TensorChunkSpec(split_dim=dim):
            raise MixedChunksError(f"a block mask is split along dimension 0 (spec: {dim})")
    raise BatchError(
        f"a value of type {type(value).__name__} has the chunk spec {spec!r}; tensors and block "
        "masks take TensorChunkSpec, everything takes _Replicate()"
    )


def _split_leaf(value: Any, spec: Any, num_chunks: int) -> Sequence[Any]:
    if not isinstance(spec, TensorChunkSpec):
        return [value] * num_chunks
    if _is_mask(value):
        return _split_block_mask(value, num_chunks)
    return _split_tensor(value, spec, num_chunks)


def _split_tensor(
    tensor: torch.Tensor, spec: TensorChunkSpec, num_chunks: int
) -> Sequence[torch.Tensor]:
    """Split a tensor into nearly equal views; one over a mesh keeps mesh and placements."""
    dim, rows = spec.split_dim, tensor.size(spec.split_dim)
    if rows < num_chunks:
        raise MixedChunksError(
            f"a tensor of shape {tuple(tensor.shape)} has {rows} rows for {num_chunks} "
            f"microbatches; use at most {rows}"
        )
    # Each rank of a mesh splits its own part, without talking to the others.
    chunks: Sequence[torch.Tensor] = own_part(tensor).tensor_split(num_chunks, dim)
    if isinstance(tensor, DTensor):
        counts = share_out(rows, num_chunks)
        chunks = [_spread(*pair, tensor, dim) for pair in zip(chunks, counts, strict=True)]
    # A view of a leaf keeps its gradient only on request.
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        for chunk in chunks:
            chunk.retain_grad()
    return chunks


def _spread(part: torch.Tensor, rows: int, like: DTensor, dim: int) -> torch.Tensor:
    """Return the tensor that is placed like another one, with this number of rows in all."""
    sizes = list(like.shape)
    sizes[dim] = rows
    return spread(part, like.device_mesh, like.placements, sizes, like.stride())


def _split_block_mask(block_mask: BlockMask, num_chunks: int) -> list[BlockMask]:
    """Split a block mask along its batch dimension; one that is broadcast is replicated."""
    rows = block_mask.kv_num_blocks.size(0)
    if not has_rows(block_mask):
        return [block_mask] * num_chunks
    if rows < num_chunks:
        raise MixedChunksError(f"a block mask has {rows} rows for {num_chunks} microbatches")
    return split_mask(block_mask, share_out(rows, num_chunks))


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Put the outputs of all microbatches together; without a spec, along dimension 0."""
    if chunk_spec is None:
        chunk_spec = tree_map(lambda _: TensorChunkSpec(DEFAULT_CHUNK_DIM), chunks[0])
    specs, structure = tree_flatten(chunk_spec)
    rows = [tree_flatten(chunk)[0] for chunk in chunks]
    for number, row in enumerate(rows):
        if len(row) != len(specs):
            raise BatchError(
                f"the output of microbatch {number} has {len(row)} values for {len(specs)} chunk "
                "specs; give a spec for each"
            )
    return tree_unflatten(list(map(_merge_column, zip(*rows, strict=True), specs)), structure)


def _merge_column(values: Sequence[Any], spec: Any) -> Any:
    if isinstance(spec, TensorChunkSpec):
        return _concatenate(values, spec.split_dim)
    if isinstance(spec, _CustomReducer):
        return reduce(spec.reduce_fn, values, spec.init_value)
    for value in values[1:]:
        if value != values[0]:
            raise MixedChunksError(
                f"an output that is not merged has the values {values[0]} and {value}; give it a "
                "TensorChunkSpec or a _CustomReducer"
            )
    return values[0]


def _concatenate(values: Sequence[Any], dim: int) -> torch.Tensor:
    over_meshes = [value for value in values if isinstance(value, DTensor)]
    if 0 < len(over_meshes) < len(values):
        raise MixedChunksError("chunks to merge are a mix of DTensors and plain tensors")
    for number, value in enumerate(over_meshes):
        if value.placements != over_meshes[0].placements:
            raise MixedChunksError(
                f"placement mismatch between chunks 0 and {number}: {over_meshes[0].placements} "
                f"and {value.placements}"
            )
    parts = torch.cat([own_part(value) for value in values], dim=dim)
    if not over_meshes:
        return parts
    return _spread(parts, sum(value.size(dim) for value in over_meshes), over_meshes[0], dim)
