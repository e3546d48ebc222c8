"""The files of a checkpoint, compared with what the manifest says of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from penstock.checkpoint.digests import CHUNK_BYTES, Digest
from penstock.checkpoint.manifest import File, Manifest
from penstock.checkpoint.manifest_reading import read_manifest
from penstock.checkpoint.storage.interface import Storage
from penstock.checkpoint.storage.steps import folder_of
from penstock.checkpoint.storage.words import in_words
from penstock.errors import CheckpointError

__all__ = ["FilePiece", "check_files", "describe_file"]


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Memory for the bytes of a file from a position on."""

    position: int
    memory: memoryview


class _Scan:
    """One pass over a file, which is digested on the way: piece by piece, while it is in cache."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest, self.size = Digest(), 0
        self._scratch = memoryview(bytearray(CHUNK_BYTES))

    def read(self, memory: memoryview) -> bool:
        """Fill memory with the next bytes; return False if the file ends before."""
        while len(memory):
            # Up to the next mebibyte of the file, which is then digested as a whole.
            # Clients of object stores lack what Python's own loop needs.
            left = CHUNK_BYTES - self.size % CHUNK_BYTES
            count: int = self._file.readinto(memory[:left])  # type: ignore[attr-defined]  # all binary files have it
            if not count:
                return False
            self._digest.update(memory[:count])
            self.size += count
            memory = memory[count:]
        return True

    def skip_to(self, position: int) -> bool:
        """Take the bytes before a position; return False if the file ends before."""
        while (left := position - self.size) > 0:
            if not self.read(self._scratch[:left]):
                return False
        return True

    def finish(self) -> File:
        """Take the rest; return the length and the digest of the file."""
        while self.read(self._scratch):
            pass
        return File(self.size, self._digest.text())


def describe_file(storage: Storage, path: str, wanted: Iterable[FilePiece] = ()) -> File:
    """Return the length and the digest of a file.

    On the way, fill the wanted pieces, which are in order and do not overlap; those behind the
    end of the file do not change.
    """
    with in_words("read", storage.show(path)), storage.open(path) as file:
        scan = _Scan(file)
        for piece in wanted:
            if not (scan.skip_to(piece.position) and scan.read(piece.memory)):
                break
        return scan.finish()


def check_files(
    storage: Storage,
    manifest: Manifest,
    names: Iterable[str],
    others: Iterable[int],
    wanted: Mapping[str, Sequence[FilePiece]],
) -> None:
    """Refuse files that differ from what was saved; `others` are steps they may come from.

    On the way, fill what is wanted of them.
    """
    for name in names:
        path, expected = f"{folder_of(manifest.step)}/{name}", manifest.files[name]
        shown, size = storage.show(path), storage.size(path)
        if size is None:
            raise CheckpointError(f"{shown} is missing")
        if size != expected.bytes:
            raise CheckpointError(f"{shown} must have {expected.bytes} bytes (got {size})")
        found = describe_file(storage, path, wanted.get(name, ()))
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
