"""Files in object stores and on other systems that fsspec can reach, such as `s3://bucket/run`."""

import time
from collections.abc import Iterable
from typing import Any, BinaryIO, cast

from penstock.checkpoint.storage.words import in_words
from penstock.errors import ArgumentError, MissingDependencyError

__all__ = ["ObjectStorage"]

# A large part is handed over in pieces, since some clients copy what they are given.
_PIECE_BYTES = 2**26
# After this, whoever has written an object last finds its own.
_SETTLE_SECONDS = 0.3


class ObjectStorage:
    """Objects below a URL; an object appears when it was written whole."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files: Any
        self._files, self._root = _open_file_system(self._url)

    def show(self, path: str) -> str:
        """Return the whole URL."""
        return f"{self._url}/{path}"

    def names(self, path: str) -> list[str]:
        """Return the names in a folder in order; none if it does not exist."""
        with in_words("list", self.show(path)):
            try:
                found = self._files.ls(self._at(path), detail=False, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found} - {""})

    def size(self, path: str) -> int | None:
        """Return the bytes of an object, or None if there is no such object."""
        with in_words("read", self.show(path)):
            try:
                facts = self._files.info(self._at(path))
            except FileNotFoundError:
                return None
        return int(facts["size"]) if facts["type"] == "file" else None

    def open(self, path: str) -> BinaryIO:
        """Return an object to read from any position."""
        with in_words("read", self.show(path)):
            return cast("BinaryIO", self._files.open(self._at(path), "rb"))

    def write(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write an object; it is stored on return."""
        with in_words("write", self.show(path)):
            self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            with self._files.open(self._at(path), "wb") as stream:
                for part in parts:
                    view = memoryview(part)
                    for start in range(0, len(view), _PIECE_BYTES):
                        stream.write(bytes(view[start : start + _PIECE_BYTES]))

    def create(self, path: str, data: bytes) -> bool:
        """Write a small object if there is none of this name; return whether it was written.

        Stores have no exclusive creation in common: of two that write at once, the last succeeds.
        """
        if self.size(path) is not None:
            return False
        self.replace(path, data)
        time.sleep(_SETTLE_SECONDS)
        with in_words("read", self.show(path)):
            return bool(self._files.cat_file(self._at(path)) == data)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object in place of another."""
        with in_words("write", self.show(path)):
            self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(self._at(path), data)

    def replace_if(self, path: str, before: bytes, data: bytes) -> bool:
        """Write a small object in place of another that holds `before`; return whether it did.

        Stores have no such operation in common: of two that write at once, the last succeeds.
        """
        with in_words("read", self.show(path)):
            try:
                is_same = bool(self._files.cat_file(self._at(path)) == before)
            except FileNotFoundError:
                is_same = False
        if is_same:
            self.replace(path, data)
        return is_same

    def remove(self, path: str) -> None:
        """Remove an object, or all below a name; nothing if it does not exist."""
        with in_words("remove", self.show(path)):
            try:
                self._files.rm(self._at(path), recursive=True)
            except FileNotFoundError:
                return

    def free_bytes(self) -> int | None:
        """Return None, because stores do not say."""
        return None

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return the client of a URL and the path in it."""
    try:
        import fsspec  # type: ignore[import-untyped]  # it ships no types
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{url} needs fsspec, which is not installed; run pip install 'penstock[objects]'"
        ) from error
    try:
        # Listings must not come from a cache, because other processes write too.
        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise MissingDependencyError(f"{url} needs another package: {error}") from error
    except ValueError as error:
        raise ArgumentError(f"{url} must be a folder that fsspec can reach: {error}") from error
    return files, str(root).rstrip("/")
