"""A digest of a long file that takes little time: the SHA-256 of the CRC-32 of every mebibyte.

It finds damage, and not forgery: whoever can write a file can also write its manifest.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator

__all__ = ["Digest", "digest_bytes"]

_CHUNK_BYTES = 2**20


class Digest:
    """The digest of bytes that come in pieces of any length."""

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        self._sum, self._length = 0, 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next piece."""
        view = memoryview(data)
        while len(view):
            piece = view[: _CHUNK_BYTES - self._length]
            self._sum = zlib.crc32(piece, self._sum)
            self._length += len(piece)
            if self._length == _CHUNK_BYTES:
                self._end_chunk()
            view = view[len(piece) :]

    def passing(self, pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
        """Yield pieces in short ones, each added right before: it is still in cache for others."""
        for piece in pieces:
            view = memoryview(piece)
            for begin in range(0, len(view), _CHUNK_BYTES):
                short = view[begin : begin + _CHUNK_BYTES]
                self.update(short)
                yield short

    def text(self) -> str:
        """Return the digest, after the last piece."""
        if self._length:
            self._end_chunk()
        return self._sums.hexdigest()

    def _end_chunk(self) -> None:
        self._sums.update(self._sum.to_bytes(4, "little"))
        self._sum, self._length = 0, 0


def digest_bytes(*pieces: bytes | bytearray | memoryview) -> str:
    """Return the digest of pieces, one after the other.

    >>> digest_bytes(b"one", b"two") == digest_bytes(b"onetwo")
    True
    """
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.text()
