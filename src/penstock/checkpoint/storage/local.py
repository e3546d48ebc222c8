"""Files in a folder of a file system that all processes see."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from penstock.atomic_files import replacing
from penstock.checkpoint.storage.words import in_words

__all__ = ["LocalStorage"]


class LocalStorage:
    """A local or shared folder, which is made when the first file is written."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def show(self, path: str) -> str:
        """Return the whole path."""
        return str(self._root / path)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder in order; none if it does not exist."""
        folder = self._root / path
        with in_words("list", str(folder)):
            try:
                return sorted(path.name for path in folder.iterdir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, or None if there is no such file."""
        file = self._root / path
        with in_words("read", str(file)):
            return file.stat().st_size if file.is_file() else None

    def open(self, path: str) -> BinaryIO:
        """Return a file to read from any position."""
        with in_words("read", self.show(path)):
            return (self._root / path).open("rb")

    def write(
        self, path: str, parts: Iterable[bytes | memoryview], *, makes_folders: bool = True
    ) -> None:
        """Write a new file, and wait until it is on the disk."""
        file = self._root / path
        with in_words("write", str(file), self.free_bytes):
            if makes_folders:
                file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb", buffering=0) as stream:
                for part in parts:
                    rest = memoryview(part)
                    # The system writes two gigabytes at most in one call.
                    while len(rest):
                        rest = rest[stream.write(rest) :]
                os.fsync(stream.fileno())

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file if there is none of this name; return whether it was written."""
        file = self._root / path
        with in_words("write", str(file), self.free_bytes):
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with file.open("xb", buffering=0) as stream:
                    stream.write(data)
            except FileExistsError:
                return False
            return True

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file in place of another, so that readers see the one or the other."""
        file = self._root / path
        with in_words("write", str(file), self.free_bytes), replacing(file) as partial:
            partial.write_bytes(data)

    def replace_if(self, path: str, before: bytes, data: bytes) -> bool:
        """Write a small file in place of another that holds `before`; return whether it did."""
        file = self._root / path
        with in_words("write", str(file), self.free_bytes), _alone_in(file.parent):
            try:
                is_same = file.read_bytes() == before
            except FileNotFoundError:
                is_same = False
            if is_same:
                self.replace(path, data)
            return is_same

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that it holds; nothing if it does not exist."""
        place = self._root / path
        with in_words("remove", str(place)):
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def rename(self, path: str, other: str) -> None:
        """Give a folder another name, at once; both names are on the disk on return."""
        source, target = self._root / path, self._root / other
        with in_words("rename", f"{source} to {target}", self.free_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            _sync(source)
            source.rename(target)
            _sync(target.parent)
            _sync(source.parent)

    def free_bytes(self) -> int | None:
        """Return how many bytes still fit."""
        try:
            return shutil.disk_usage(self._root).free
        except OSError:
            return None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep out other processes that do the same, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks, and the lock ends with the process.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
