"""What checkpoints need of a place to keep files in. Paths in it are relative, with slashes."""

from collections.abc import Iterable
from typing import BinaryIO, Protocol

__all__ = ["OWN_FOLDER", "Storage"]

# Whatever is in this folder is ours: the lease, and what is not complete yet.
OWN_FOLDER = ".penstock"


class Storage(Protocol):
    """A folder of files; every method raises `CheckpointError` in words if the disk refuses."""

    def show(self, path: str) -> str:
        """Return the whole path, for messages."""

    def names(self, path: str) -> list[str]:
        """Return the names in a folder in order; none if it does not exist."""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, or None if there is no such file."""

    def open(self, path: str) -> BinaryIO:
        """Return a file to read from any position."""

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a new file, and wait until it is stored; folders are made as needed."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file if there is none of this name; return whether it was written."""

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file in place of another, so that readers see the one or the other."""

    def replace_if(self, path: str, before: bytes, data: bytes) -> bool:
        """Write a small file in place of another that holds `before`; return whether it did.

        Where the storage can, no other process comes between the look and the writing.
        """

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that it holds; nothing if it does not exist."""

    def free_bytes(self) -> int | None:
        """Return how many bytes still fit, or None if nobody knows."""
