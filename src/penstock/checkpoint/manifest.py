"""The manifest of a checkpoint: what it holds and where, as JSON.

The files beside it are those of `torch.distributed.checkpoint`. Their index is a pickle; the
manifest says the same, so that nothing has to be unpickled: the shape, the type and the position
of the raw numbers of every tensor, and the length and a digest of every file.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.checkpoint.parts import Box
from penstock.untrusted import quote

__all__ = [
    "FORMAT",
    "KIND",
    "SECTIONS",
    "Chunk",
    "File",
    "Manifest",
    "SavedTensor",
    "count_sections",
    "digest",
    "find_dtype",
]

FORMAT = 3
KIND = "penstock checkpoint"
# The first words of keys that are counted, so that none can be missing.
SECTIONS = ("model.", "optim.state.", "optim.param_groups.", "random.", "pipeline.")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and where its numbers are stored."""

    box: Box
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
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a checkpoint holds.

    Keys are `model.NAME`, `optim.state.NAME.KEY`, `optim.param_groups.NAME.KEY`,
    `random.RANK.DEVICE` and `pipeline.random_step`; `aliases` has further names of parameters that
    are saved once. `optimizer` is the class of the optimizer, if one was saved.
    """

    step: int
    processes: int
    optimizer: str | None
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    aliases: dict[str, str]
    files: dict[str, File]
    data: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    byte_order: str = sys.byteorder

    def to_bytes(self) -> bytes:
        """Return the text of the manifest, with its digest."""
        tensors = {
            key: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "chunks": [
                    {
                        "offsets": chunk.box.offsets,
                        "sizes": chunk.box.sizes,
                        "file": chunk.file,
                        "position": chunk.position,
                    }
                    for chunk in tensor.chunks
                ],
            }
            for key, tensor in self.tensors.items()
        }
        content = {
            "step": self.step,
            "processes": self.processes,
            "optimizer": self.optimizer,
            "counts": count_sections([*self.tensors, *self.values]),
            "tensors": tensors,
            "values": self.values,
            "aliases": self.aliases,
            "files": {
                name: {"bytes": f.bytes, "digest": f.digest} for name, f in self.files.items()
            },
            "data": self.data,
            "versions": self.versions,
            "byte_order": self.byte_order,
        }
        text = json.dumps(content, sort_keys=True)
        head = {"kind": KIND, "format": FORMAT, "sha256": digest(text)}
        return f'{json.dumps(head)[:-1]}, "content": {text}}}'.encode()


def count_sections(keys: Iterable[str]) -> dict[str, int]:
    """Return how many keys each section has."""
    found = Counter(next((s for s in SECTIONS if key.startswith(s)), key) for key in keys)
    return dict(found)


def digest(content: str) -> str:
    """Return the SHA-256 of a content as JSON with sorted names."""
    return hashlib.sha256(content.encode()).hexdigest()


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
