"""When a wait may end without what it waits for, so that no bytes are taken for others.

A released receiver reads whatever lies in its ring, which is NaN by then; a released sender writes
over whatever lies there. Neither may happen while the other end could still write, or read, what
the places meant before. Each end therefore leaves a note in shared memory of the last entry that
it has queued, which is final once it can queue no more:

    receiver   reads NaN     once it has read the last entry that was ever sent
    sender     overwrites    once the last entry that was ever to be read is read

An end whose note does not become final, because its host has stopped, is given up. Its device may
still work, and then finishes the steps that all ranks have completed by itself, so that only these
are waited for. What a device reads beyond them belongs to a step that raises an error.
"""

from dataclasses import dataclass

__all__ = ["LastQueued", "has_reached", "may_overwrite", "may_read_nan"]

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class LastQueued:
    """The last entry that an end has queued, and whether none will follow."""

    number: int
    is_final: bool

    @classmethod
    def from_word(cls, word: int) -> "LastQueued":
        """Read a note from a word of shared memory."""
        return cls(word >> 1, bool(word & 1))

    def to_word(self) -> int:
        """Return the note as one word, which is written at once."""
        return self.number * 2 + self.is_final


def has_reached(counter: int, number: int) -> bool:
    """Return whether a counter is at this number or beyond, as the device compares them.

    >>> has_reached(3, 2), has_reached(1, 2**32 - 1), has_reached(2**32 - 1, 1)
    (True, True, False)
    """
    return (counter - number) % (1 << _WORD_BITS) < 1 << (_WORD_BITS - 1)


def may_read_nan(
    freed: int,
    sent: LastQueued,
    *,
    completed: int,
    oldest_kept: int,
    is_given_up: bool,
    is_gone: bool,
) -> bool:
    """Return whether a receiver may read what was never sent, once its ring is filled with NaN.

    It has read up to `freed`, and up to `completed` in steps that it has completed. Entries from
    `oldest_kept` on lie in places of their own, in which nothing but themselves can arrive.
    """
    if is_gone or (sent.is_final and has_reached(freed, sent.number)):
        return True
    return is_given_up and has_reached(freed, min(completed, oldest_kept - 1))


def may_overwrite(
    freed: int, taken: LastQueued, *, offered: int, is_given_up: bool, is_gone: bool
) -> bool:
    """Return whether a sender may overwrite what was not read.

    The receiver has noted what it had queued at the end of its last step, and the sender has
    `offered` this much by the end of its own. A step is complete only if both have got there.
    """
    if is_gone or (taken.is_final and has_reached(freed, taken.number)):
        return True
    return is_given_up and has_reached(freed, min(offered, taken.number))
