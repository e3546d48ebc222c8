"""Errors of disks in words that say what to do."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import CheckpointError

__all__ = ["in_words"]

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
# One way out for each of these.
_WORDS = {
    errno.EFBIG: "the file is longer than this system allows; raise the limit (ulimit -f)",
    errno.EMFILE: "this process has too many open files; raise the limit (ulimit -n)",
    errno.EXDEV: "the two are on different disks; let .penstock be a folder beside the steps",
    errno.EEXIST: "a file, or a link to nowhere, is in its place; move that away",
}


def _nobody_knows() -> None:
    return None


@contextmanager
def in_words(
    doing: str, path: str, free_bytes: Callable[[], int | None] = _nobody_knows
) -> Iterator[None]:
    """Turn an error of the system into a `CheckpointError`; `doing` is "write", "read" etc."""
    try:
        yield
    except OSError as error:
        reason = _explain(error, free_bytes)
        raise CheckpointError(f"cannot {doing} {path}: {reason}") from error


def _explain(error: OSError, free_bytes: Callable[[], int | None]) -> str:
    if error.errno in _FULL:
        free = free_bytes()
        left = "" if free is None else f" ({free:,} bytes are free)"
        return f"the disk or its quota is full{left}; make room, or keep fewer steps"
    if error.errno in _DENIED:
        return (
            f"permission denied ({error.strerror}); allow this process to, or use another folder"
        )
    if error.errno in _MISSING:
        return "it does not exist, or another process has removed it"
    if error.errno in _WORDS:
        return _WORDS[error.errno]
    return f"{type(error).__name__}: {error}"
