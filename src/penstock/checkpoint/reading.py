"""From the files of a checkpoint to tensors in memory: checked first, then read.

Torch's planner works out which parts of which files make up a tensor or a shard of it, from an
index that is built from the manifest.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.checkpoint.manifest import (
    Manifest,
    SavedTensor,
    describe_file,
    read_manifest,
)
from penstock.checkpoint.tensor_bytes import read_rows
from penstock.errors import CheckpointError

__all__ = ["check_files", "read_tensors"]


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str], others: Iterable[Path]
) -> None:
    """Refuse files that differ from what was saved; `others` are where they may come from."""
    for name in names:
        path, expected = folder / name, manifest.files[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != expected.bytes:
            raise CheckpointError(
                f"{path} must have {expected.bytes} bytes (got {path.stat().st_size})"
            )
        found = describe_file(path)
        if found != expected:
            origin = _find_origin(found.sha256, others)
            raise CheckpointError(
                f"{path} is not the file that was saved: "
                + ("its SHA-256 differs" if origin is None else f"it belongs to {origin}")
            )


def _find_origin(sha256: str, folders: Iterable[Path]) -> str | None:
    """Return the file of another checkpoint that has this SHA-256."""
    for folder in folders:
        try:
            files = read_manifest(folder).files
        except CheckpointError:
            continue
        for name, file in files.items():
            if file.sha256 == sha256:
                return str(folder / name)
    return None


def read_tensors(
    folder: Path, manifest: Manifest, targets: Mapping[str, tuple[str, torch.Tensor]]
) -> None:
    """Read tensors into their targets, each with the key under which it is saved.

    Targets have names of their own, because several of them may be saved as one.
    """
    saved = {name: manifest.tensors[key] for name, (key, _) in targets.items()}
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(
        {name: target for name, (_, target) in targets.items()},
        Metadata({name: _index(tensor) for name, tensor in saved.items()}),
        True,
    )
    chunks = {
        (name, chunk.offsets): chunk for name, tensor in saved.items() for chunk in tensor.chunks
    }
    for item in planner.create_local_plan().items:
        index = item.storage_index
        assert index.offset is not None, "a part of a tensor has an offset in it"
        chunk, dtype = chunks[index.fqn, tuple(index.offset)], saved[index.fqn].torch_dtype
        if 0 not in item.lengths:
            numbers = read_rows(folder, chunk, dtype, item.storage_offsets, item.lengths)
            planner.resolve_tensor(item).detach().copy_(numbers)


def _index(saved: SavedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=saved.torch_dtype),
        torch.Size(saved.shape),
        [
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in saved.chunks
            if 0 not in chunk.sizes
        ],
    )
