"""The files of a checkpoint, compared with what the manifest says of them."""

from collections.abc import Iterable

from penstock.checkpoint.digests import Digest
from penstock.checkpoint.manifest import File, Manifest
from penstock.checkpoint.manifest_reading import read_manifest
from penstock.checkpoint.storage.interface import Storage
from penstock.checkpoint.storage.steps import folder_of
from penstock.checkpoint.storage.words import in_words
from penstock.errors import CheckpointError

__all__ = ["check_files", "describe_file"]


def describe_file(storage: Storage, path: str) -> File:
    """Return the length and the digest of a file."""
    with in_words("read", storage.show(path)), storage.open(path) as file:
        # Python's own loop; clients of object stores lack what it needs.
        digest, size = Digest(), 0
        buffer = memoryview(bytearray(2**20))
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # all binary files have it
            digest.update(buffer[:count])
            size += count
    return File(size, digest.text())


def check_files(
    storage: Storage, manifest: Manifest, names: Iterable[str], others: Iterable[int]
) -> None:
    """Refuse files that differ from what was saved; `others` are steps they may come from."""
    for name in names:
        path, expected = f"{folder_of(manifest.step)}/{name}", manifest.files[name]
        shown, size = storage.show(path), storage.size(path)
        if size is None:
            raise CheckpointError(f"{shown} is missing")
        if size != expected.bytes:
            raise CheckpointError(f"{shown} must have {expected.bytes} bytes (got {size})")
        found = describe_file(storage, path)
        if found != expected:
            origin = _find_origin(storage, found.digest, others)
            raise CheckpointError(
                f"{shown} is not the file that was saved: "
                + ("its digest differs" if origin is None else f"it belongs to {origin}")
            )


def _find_origin(storage: Storage, digest: str, steps: Iterable[int]) -> str | None:
    """Return the file of another checkpoint that has this digest."""
    for step in steps:
        try:
            files = read_manifest(storage, step).files
        except CheckpointError:
            continue
        for name, file in files.items():
            if file.digest == digest:
                return storage.show(f"{folder_of(step)}/{name}")
    return None
