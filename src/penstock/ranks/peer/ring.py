"""Where messages lie in a ring of memory, as both of its ends compute it for themselves.

    |  entry 7  | entry 8 |          unused          | entry 5 |    entry 6    |
    0                      `-- entry 9 goes here                             capacity

Sender and receiver see the same sizes in the same order, so they place every entry alike and need
no words about it. An entry may overwrite older ones as soon as the receiver has freed the newest
of these. What is larger than the ring goes through it in pieces.
"""

from collections import deque
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Ring", "RingEntry"]

ALIGNMENT = 256


class RingEntry(NamedTuple):
    """A piece of a message: its number, its bytes within the message, and its place in the ring.

    `after` is the number of the entry that must have been freed before this one is written.
    """

    number: int
    start: int
    size: int
    offset: int
    after: int


class Ring:
    """The order of entries in a ring of `capacity` bytes; entries are numbered from 1."""

    def __init__(self, capacity: int, *, entries: int = 0) -> None:
        self.capacity = capacity
        self.entries = entries
        self._end = 0
        # Entries that nothing has overwritten yet, oldest first: number, offset, end.
        self._present: deque[tuple[int, int, int]] = deque()

    @property
    def oldest_kept(self) -> int:
        """The oldest entry that nothing has overwritten; all from there on lie side by side."""
        return self._present[0][0] if self._present else self.entries + 1

    def place(self, size: int) -> list[RingEntry]:
        """Return the entries of the next message, of at least one byte."""
        if size <= self.capacity:
            return [self._place(0, size)]
        # Half a ring each, so that one is written while the other is read.
        most = self.capacity // 2 // ALIGNMENT * ALIGNMENT
        return [self._place(start, min(most, size - start)) for start in range(0, size, most)]

    def _place(self, start: int, size: int) -> RingEntry:
        offset, after = self._end, 0
        if offset + size > self.capacity:
            # What lies behind the unused rest is older than what lies at the beginning.
            after = self._overwrite(self._end, self.capacity)
            offset = 0
        end = offset + _aligned(size)
        after = self._overwrite(offset, end) or after
        self.entries += 1
        self._end = end
        self._present.append((self.entries, offset, end))
        return RingEntry(self.entries, start, size, offset, after)

    def _overwrite(self, offset: int, end: int) -> int:
        """Forget the oldest entries as far as they lie there; return the newest of them, or 0."""
        newest = 0
        while self._present and self._present[0][1] < end and offset < self._present[0][2]:
            newest = self._present.popleft()[0]
        return newest


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
