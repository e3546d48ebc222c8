"""A digest of a long file that takes little time: the SHA-256 of sums over every mebibyte.

A mebibyte is a table of numbers with 64 bits, whose rows and columns are added up: what changes
one number, one row or one column, or moves rows, changes a sum. This takes less time than a
CRC-32. It finds damage, and not forgery: whoever can write a file can also write its manifest.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

__all__ = ["CHUNK_BYTES", "Digest", "digest_bytes"]

CHUNK_BYTES = 2**20
_ROWS, _COLUMNS = 128, 1024
_NUMBER = np.dtype("<u8")


class Digest:
    """The digest of bytes that come in pieces of any length.

    Pieces that begin and end with a mebibyte of the file are not copied.
    """

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        # The last mebibyte, as far as it has come.
        self._last, self._filled = bytearray(CHUNK_BYTES), 0
        self._length = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next piece."""
        view = memoryview(data)
        self._length += len(view)
        while len(view):
            piece = view[: CHUNK_BYTES - self._filled]
            view = view[len(piece) :]
            if len(piece) == CHUNK_BYTES:
                self._add_up(piece)
                continue
            self._last[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == CHUNK_BYTES:
                self._add_up(self._last)
                self._filled = 0

    def passing(self, pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        """Yield pieces in short ones, each added right before: it is still in cache for others."""
        for piece in pieces:
            view = memoryview(piece)
            for begin in range(0, len(view), CHUNK_BYTES):
                short = view[begin : begin + CHUNK_BYTES]
                self.update(short)
                yield short

    def text(self) -> str:
        """Return the digest, after the last piece."""
        if self._filled:
            self._last[self._filled :] = bytes(CHUNK_BYTES - self._filled)
            self._add_up(self._last)
        self._sums.update(self._length.to_bytes(8, "little"))
        return self._sums.hexdigest()

    def _add_up(self, chunk: bytes | bytearray | memoryview) -> None:
        table = np.frombuffer(chunk, dtype=_NUMBER).reshape(_ROWS, _COLUMNS)
        for axis in (0, 1):
            self._sums.update(np.add.reduce(table, axis=axis).data)


def digest_bytes(*pieces: bytes | bytearray | memoryview) -> str:
    """Return the digest of pieces, one after the other.

    >>> digest_bytes(b"one", b"two") == digest_bytes(b"onetwo")
    True
    """
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.text()
