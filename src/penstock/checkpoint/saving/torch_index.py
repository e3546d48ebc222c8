"""The index that `torch.distributed.checkpoint` reads, and plain values in its form."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from penstock.checkpoint.manifest import find_dtype
from penstock.checkpoint.parts import Part
from penstock.checkpoint.saving.archives import archive_value
from penstock.checkpoint.saving.image import Place
from penstock.torch_private import StorageInfo

__all__ = ["TORCH_INDEX", "StoredPart", "StoredValues", "make_index", "section_of", "store_values"]

TORCH_INDEX = ".metadata"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part, its file, and its place in the file."""

    part: Part
    file: str
    place: Place


@dataclass(frozen=True, slots=True)
class StoredValues:
    """Plain values as torch reads them; `places` has start and length of each, by key.

    Values that are alike are stored once.
    """

    blob: bytes
    places: dict[str, tuple[int, int]]


def store_values(values: Mapping[str, Any], start: int) -> StoredValues:
    """Return values as they follow what is already in a file up to `start`."""
    blob = bytearray()
    alike: dict[str, tuple[int, int]] = {}
    places = {}
    for key, value in values.items():
        text = repr(value)
        if text not in alike:
            stored = archive_value(value)
            alike[text] = start + len(blob), len(stored)
            blob += stored
        places[key] = alike[text]
    return StoredValues(bytes(blob), places)


def make_index(
    parts: Sequence[StoredPart],
    values: Mapping[str, tuple[int, int]],
    values_file: str,
    aliases: Mapping[str, str],
) -> bytes:
    """Return torch's index of a checkpoint: everything under all of its names."""
    others: dict[str, list[str]] = {}
    for name, saved in aliases.items():
        others.setdefault(saved, []).append(name)
    index = Metadata({}, {}, {}, StorageMeta(), CURRENT_DCP_VERSION)
    kinds: dict[str, TensorStorageMetadata] = {}
    for stored in parts:
        part, place = stored.part, stored.place
        offsets = torch.Size(part.box.offsets)
        kind = kinds.get(part.key)
        if kind is None:
            properties = TensorProperties(dtype=find_dtype(part.dtype))
            kind = TensorStorageMetadata(properties, torch.Size(part.shape), [])
            kinds[part.key] = kind
        kind.chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.box.sizes)))
        where = StorageInfo(stored.file, place.start, place.length)
        for key in _all_keys(part.key, others):
            _add(index, key, kind, MetadataIndex(key, offsets), where)
    plain = BytesStorageMetadata()
    for first, (start, length) in values.items():
        where = StorageInfo(values_file, start, length)
        for key in _all_keys(first, others):
            _add(index, key, plain, MetadataIndex(key), where)
    return pickle.dumps(index)


def section_of(key: str) -> tuple[str, str]:
    """Return the section and the rest of a key, as in the nested state of torch.

    >>> section_of("model.layers.0.weight")
    ('model', 'layers.0.weight')
    """
    section, _, rest = key.partition(".")
    return section, rest


def _add(
    index: Metadata,
    key: str,
    kind: TensorStorageMetadata | BytesStorageMetadata,
    item: MetadataIndex,
    where: StorageInfo,
) -> None:
    index.state_dict_metadata[key] = kind
    index.planner_data[key] = section_of(key)
    index.storage_data[item] = where


def _all_keys(key: str, others: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a key, and the keys of further names of its parameter."""
    if not others:
        return [key]
    section, rest = section_of(key)
    kind, _, detail = rest.partition(".")
    name, dot, last = detail.rpartition(".")
    if section == "model":
        return [key, *(f"model.{other}" for other in others.get(rest, ()))]
    if section == "optim":
        return [key, *(f"optim.{kind}.{other}{dot}{last}" for other in others.get(name, ()))]
    return [key]
