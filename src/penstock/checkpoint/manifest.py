"""The manifest of a checkpoint: what it holds and where, as JSON that is checked when it is read.

The files beside it are those of `torch.distributed.checkpoint`. Their index is a pickle; the
manifest says the same, so that nothing has to be unpickled: the shape, the type and the position
of the raw numbers of every tensor, and the length and SHA-256 of every file.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.untrusted import quote

__all__ = [
    "FORMAT",
    "MANIFEST",
    "Chunk",
    "File",
    "Manifest",
    "SavedTensor",
    "describe_file",
    "find_dtype",
    "read_manifest",
]

MANIFEST = "penstock.json"
FORMAT = 1
_KIND = "penstock checkpoint"
# The largest manifest: one of a million tensors has about this size.
_MOST_BYTES = 2**30
# The largest count that fits into torch's sizes.
_MOST_ITEMS = 2**62
# The longest file name on any file system.
_MOST_LETTERS = 255


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: its position in the tensor, and where its numbers are stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint; `dtype` is torch's name of the type."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type as a value of torch."""
        return find_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class File:
    """The length and the digest that a file must have."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a checkpoint holds.

    Keys are `model.NAME`, `optim.state.NAME.KEY`, `optim.param_groups.NAME.KEY`,
    `random.RANK.DEVICE` and `pipeline.random_step`; `aliases` has further names of parameters that
    are saved once.
    """

    step: int
    processes: int
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    aliases: dict[str, str]
    files: dict[str, File]
    data: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    byte_order: str = sys.byteorder

    def write(self, folder: Path) -> None:
        """Write the manifest to a folder, and wait until it is on the disk."""
        # As it will be read back: JSON has no tuples, and keys are text.
        content = json.loads(json.dumps(asdict(self)))
        whole = {"kind": _KIND, "format": FORMAT, "sha256": _digest(content), "content": content}
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(whole, file)
            file.flush()
            os.fsync(file.fileno())


def describe_file(path: Path) -> File:
    """Return the length and SHA-256 of a file."""
    with path.open("rb") as file:
        return File(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a complete checkpoint, or raise what is wrong with it."""
    path = folder / MANIFEST
    content = _read_content(path)
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}; load another step"
        ) from error
    if manifest.byte_order != sys.byteorder:
        raise CheckpointError(
            f"{path} must have the byte order of this machine, {sys.byteorder!r} (got "
            f"{quote(manifest.byte_order)}); load it on a machine like the one that saved it"
        )
    return manifest


def _read_content(path: Path) -> dict[str, Any]:
    """Return the content of the manifest, if it has a known format and is undamaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, so this is not a checkpoint of Penstock")
    if path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(f"{path} is too large for a manifest ({path.stat().st_size} bytes)")
    try:
        whole = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON; load another step") from error
    if not isinstance(whole, dict) or whole.get("kind") != _KIND:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint of Penstock")
    if whole.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} must have format {FORMAT} for this version of Penstock (got "
            f"{quote(whole.get('format'))}); load it with the version that wrote it"
        )
    content = whole.get("content")
    if not isinstance(content, dict) or whole.get("sha256") != _digest(content):
        raise CheckpointError(
            f"{path} is damaged: its content does not match its SHA-256; load another step"
        )
    return content


def find_dtype(name: object) -> torch.dtype:
    """Return a type of torch by its name.

    >>> find_dtype("bfloat16")
    torch.bfloat16
    """
    # Not by `getattr`, because that makes torch import modules lazily.
    dtype = vars(torch).get(name) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a type of torch: {quote(name)}")
    return dtype


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse(content: dict[str, Any]) -> Manifest:
    files = {
        _file_name(name): File(_count(file["bytes"]), str(file["sha256"]))
        for name, file in content["files"].items()
    }
    _count(content["values"]["pipeline.random_step"])
    return Manifest(
        step=_count(content["step"]),
        processes=_count(content["processes"]),
        tensors={key: _parse_tensor(key, t, files) for key, t in content["tensors"].items()},
        values=dict(content["values"].items()),
        aliases={str(name): str(saved) for name, saved in content["aliases"].items()},
        files=files,
        data=dict(content["data"].items()),
        versions={str(name): str(version) for name, version in content["versions"].items()},
        byte_order=str(content["byte_order"]),
    )


def _parse_tensor(key: str, content: dict[str, Any], files: dict[str, File]) -> SavedTensor:
    dtype = find_dtype(content["dtype"])
    shape = tuple(_count(size) for size in content["shape"])
    chunks = tuple(
        Chunk(
            tuple(_count(offset) for offset in chunk["offsets"]),
            tuple(_count(size) for size in chunk["sizes"]),
            str(chunk["file"]),
            _count(chunk["position"]),
        )
        for chunk in content["chunks"]
    )
    for chunk in chunks:
        _check_chunk(key, chunk, shape, dtype.itemsize, files)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(
            f"the parts of {quote(key)} do not make up its shape {quote(list(shape))}"
        )
    return SavedTensor(shape, content["dtype"], chunks)


def _check_chunk(
    key: str, chunk: Chunk, shape: tuple[int, ...], itemsize: int, files: dict[str, File]
) -> None:
    dimensions = zip(chunk.offsets, chunk.sizes, shape, strict=True)
    if any(offset + size > length for offset, size, length in dimensions):
        raise ValueError(f"a part of {quote(key)} lies outside of its shape {quote(list(shape))}")
    end = chunk.position + math.prod(chunk.sizes) * itemsize
    if chunk.file not in files or end > files[chunk.file].bytes:
        raise ValueError(f"a part of {quote(key)} lies outside of the files")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_ITEMS:
        raise ValueError(f"not a count: {quote(value)}")
    return value


def _file_name(name: str) -> str:
    """Return a name that stays inside its folder and can be printed."""
    is_printable = name.isprintable() and 0 < len(name) <= _MOST_LETTERS
    if not is_printable or Path(name).name != name or name in (".", ".."):
        raise ValueError(f"not a file name: {quote(name)}")
    return name
