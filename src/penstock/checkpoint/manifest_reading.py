"""From the text of a manifest to its value, which is checked in full; time grows with its size.

Whoever can write the file can also make its digest right, so that nothing is taken on trust: parts
must make up their tensors without overlap, bytes belong to one part, and nothing may be missing.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from penstock.checkpoint.manifest import (
    FORMAT,
    KIND,
    SECTIONS,
    Chunk,
    File,
    Manifest,
    SavedTensor,
    count_sections,
    digest,
    find_dtype,
)
from penstock.checkpoint.parts import Box, tile_wholly
from penstock.checkpoint.storage.interface import Storage
from penstock.checkpoint.storage.steps import MANIFEST, folder_of
from penstock.errors import CheckpointError
from penstock.untrusted import quote

__all__ = ["read_manifest"]

# The largest manifest: one of a million tensors has about this size.
_MOST_BYTES = 2**30
# The largest count that fits into torch's sizes, and the most dimensions.
_MOST_ITEMS, _MOST_DIMENSIONS = 2**62, 64
# The longest file name on any file system.
_MOST_LETTERS = 255
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANDOM = re.compile(r"random\.(0|[1-9][0-9]{0,8})\.(cpu|cuda)")


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Return the manifest of a complete step, or raise what is wrong with it."""
    path = f"{folder_of(step)}/{MANIFEST}"
    shown = storage.show(path)
    content = _read_content(storage, path)
    try:
        manifest = _parse(content)
        _check_whole(manifest, content["counts"])
        if manifest.step != step:
            raise ValueError(f"it is the manifest of step {manifest.step}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{shown} is damaged: {type(error).__name__}: {error}; load another step"
        ) from error
    if manifest.byte_order != sys.byteorder:
        raise CheckpointError(
            f"{shown} must have the byte order of this machine, {sys.byteorder!r} (got "
            f"{quote(manifest.byte_order)}); load it on a machine like the one that saved it"
        )
    return manifest


def _read_content(storage: Storage, path: str) -> dict[str, Any]:
    """Return the content of the manifest, if it has a known format and is undamaged."""
    shown, size = storage.show(path), storage.size(path)
    if size is None:
        raise CheckpointError(f"{shown} is missing, so this is not a checkpoint of Penstock")
    if size > _MOST_BYTES:
        raise CheckpointError(f"{shown} is too large for a manifest ({size} bytes)")
    try:
        with storage.open(path) as file:
            whole = json.loads(file.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown} is damaged: it is not JSON; load another step") from error
    if not isinstance(whole, dict) or whole.get("kind") != KIND:
        raise CheckpointError(f"{shown} is not the manifest of a checkpoint of Penstock")
    if whole.get("format") != FORMAT:
        raise CheckpointError(
            f"{shown} must have format {FORMAT} for this version of Penstock (got "
            f"{quote(whole.get('format'))}); load it with the version that wrote it"
        )
    content = whole.get("content")
    if not isinstance(content, dict) or whole.get("sha256") != digest(
        json.dumps(content, sort_keys=True)
    ):
        raise CheckpointError(
            f"{shown} is damaged: its content does not match its SHA-256; load another step"
        )
    return content


def _parse(content: dict[str, Any]) -> Manifest:
    files = {
        _file_name(name): File(_count(file["bytes"]), _digest(file["digest"]))
        for name, file in content["files"].items()
    }
    optimizer = content["optimizer"]
    if optimizer is not None and not isinstance(optimizer, str):
        raise ValueError(f"not the name of an optimizer: {quote(optimizer)}")
    return Manifest(
        step=_count(content["step"]),
        processes=_count(content["processes"]),
        optimizer=optimizer,
        tensors={key: _parse_tensor(key, t, files) for key, t in content["tensors"].items()},
        values={key: _plain(key, value) for key, value in content["values"].items()},
        aliases={name: _text(saved) for name, saved in content["aliases"].items()},
        files=files,
        data=dict(content["data"].items()),
        versions={name: _text(version) for name, version in content["versions"].items()},
        byte_order=_text(content["byte_order"]),
    )


def _parse_tensor(key: str, content: dict[str, Any], files: Mapping[str, File]) -> SavedTensor:
    dtype = find_dtype(content["dtype"])
    shape = _counts(content["shape"])
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{quote(key)} has {len(shape)} dimensions")
    chunks = []
    for part in content["chunks"]:
        box = Box(_counts(part["offsets"]), _counts(part["sizes"]))
        chunk = Chunk(box, _text(part["file"]), _count(part["position"]))
        ranges = zip(box.offsets, box.sizes, shape, strict=True)
        if any(offset + size > length for offset, size, length in ranges):
            raise ValueError(
                f"a part of {quote(key)} lies outside of its shape {quote(list(shape))}"
            )
        end = chunk.position + box.count * dtype.itemsize
        if chunk.file not in files or end > files[chunk.file].bytes:
            raise ValueError(f"a part of {quote(key)} lies outside of the files")
        chunks.append(chunk)
    if not tile_wholly(shape, [chunk.box for chunk in chunks]):
        raise ValueError(
            f"the parts of {quote(key)} do not make up its shape {quote(list(shape))}"
        )
    return SavedTensor(shape, content["dtype"], tuple(chunks))


def _check_whole(manifest: Manifest, counts: object) -> None:
    """Refuse a manifest that lacks something, or says two things of the same."""
    keys = [*manifest.tensors, *manifest.values]
    if count_sections(keys) != counts:
        raise ValueError(f"it must hold {quote(counts)} (it holds {count_sections(keys)})")
    if both := manifest.tensors.keys() & manifest.values.keys():
        raise ValueError(f"{quote(min(both))} is a tensor and a value")
    if strange := [key for key in keys if not key.startswith(SECTIONS)]:
        raise ValueError(f"not a key of a checkpoint: {quote(strange[0])}")
    _count(manifest.values["pipeline.random_step"])
    for key in manifest.values:
        if key.startswith(("model.", "random.")):
            raise ValueError(f"{quote(key)} must be a tensor")
    _check_generators(manifest)
    names = {key.removeprefix("model.") for key in manifest.tensors if key.startswith("model.")}
    _check_optimizer(manifest, names, keys)
    for name, saved in manifest.aliases.items():
        if saved not in names or name in names:
            raise ValueError(f"{quote(name)} cannot be another name of {quote(saved)}")
    _check_bytes(manifest.tensors.values())


def _check_generators(manifest: Manifest) -> None:
    if not manifest.processes:
        raise ValueError("it must be of at least one process (got 0)")
    found = {key: t for key, t in manifest.tensors.items() if key.startswith("random.")}
    for key, state in found.items():
        match = _RANDOM.fullmatch(key)
        if match is None or int(match[1]) >= manifest.processes:
            raise ValueError(f"not a generator of {manifest.processes} processes: {quote(key)}")
        if state.dtype != "uint8" or len(state.shape) != 1:
            raise ValueError(f"{quote(key)} is not the state of a generator")
    num_hosts = sum(key.endswith(".cpu") for key in found)
    if num_hosts != manifest.processes:
        raise ValueError(
            f"it must have the generators of {manifest.processes} processes (got {num_hosts})"
        )


def _check_optimizer(manifest: Manifest, names: set[str], keys: Iterable[str]) -> None:
    """Refuse state of what is not a parameter, and state without settings."""
    named: dict[str, set[str]] = {"optim.state.": set(), "optim.param_groups.": set()}
    for key in keys:
        for section, found in named.items():
            if key.startswith(section):
                name, _, last = key.removeprefix(section).rpartition(".")
                if name not in names or not last:
                    raise ValueError(f"{quote(key)} is not of a parameter of the model")
                found.add(name)
    if lacking := named["optim.state."] - named["optim.param_groups."]:
        raise ValueError(f"{quote(min(lacking))} must have settings of its optimizer")
    if (manifest.optimizer is None) != (not named["optim.param_groups."]):
        raise ValueError(f"the optimizer is {quote(manifest.optimizer)} but its state differs")


def _check_bytes(tensors: Iterable[SavedTensor]) -> None:
    """Refuse parts that share bytes of a file."""
    ranges = sorted(
        (c.file, c.position, c.position + c.box.count * t.torch_dtype.itemsize)
        for t in tensors
        for c in t.chunks
        if c.box.count
    )
    for (file, _, end), (other, start, _) in pairwise(ranges):
        if file == other and start < end:
            raise ValueError(f"two parts share bytes of {quote(file)} from {start} on")


def _plain(key: str, value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
        raise ValueError(f"{quote(key)} is not a plain value: {quote(value)}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"not a list of counts: {quote(values)}")
    return tuple(map(_count, values))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_ITEMS:
        raise ValueError(f"not a count: {quote(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not text: {quote(value)}")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"not a digest: {quote(value)}")
    return value


def _file_name(name: str) -> str:
    """Return a name that stays inside its folder and can be printed."""
    is_printable = name.isprintable() and 0 < len(name) <= _MOST_LETTERS
    if not is_printable or PurePosixPath(name).name != name or name in (".", ".."):
        raise ValueError(f"not a file name: {quote(name)}")
    return name
