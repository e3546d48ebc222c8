"""Counters in memory that the processes of one machine share, for their devices and hosts.

A device waits in a stream until a counter has reached a value, and another device writes it. The
counters are in host memory, so that a host can end a wait when the rank that should have written
is gone, without the device: its streams may all be blocked.
"""

import ctypes
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

from penstock.ranks.peer.driver import DriverError, pin_host_memory, unpin_host_memory

__all__ = [
    "COUNTERS_PER_CHANNEL",
    "Counters",
    "SharedFlags",
    "create_flags_file",
    "machine_id",
    "remove_flags_file",
]

# One counter per line of cache, so that writers do not disturb each other.
_LINE_BYTES = 64
_FOLDER = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WORD_BITS = 32
COUNTERS_PER_CHANNEL = 5


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one channel: entries that are ready, entries that are freed, and the end.

    `sent` and `taken` are notes of the hosts: the last entry that each end has queued.
    """

    ready: int
    freed: int
    unmapped: int
    sent: int
    taken: int

    @classmethod
    def of(cls, channel: int) -> "Counters":
        """Return the counters of a channel by its number."""
        first = COUNTERS_PER_CHANNEL * channel
        return cls(first, first + 1, first + 2, first + 3, first + 4)


def machine_id() -> str:
    """Return what the processes of one machine have in common, and those of others do not."""
    return f"{_BOOT_ID.read_text().strip()} {_FOLDER.stat().st_dev}"


def create_flags_file(counters: int) -> str:
    """Create a file of zeros in shared memory that only this user can open; return its name."""
    name = f"penstock-{secrets.token_hex(16)}"
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW
    descriptor = os.open(_FOLDER / name, flags, mode=0o600)
    try:
        os.ftruncate(descriptor, _file_bytes(counters))
    finally:
        os.close(descriptor)
    return name


class SharedFlags:
    """The counters of one file, mapped into this process and pinned for its current device."""

    def __init__(self, name: str, counters: int) -> None:
        descriptor = os.open(_FOLDER / Path(name).name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            self._memory = mmap.mmap(descriptor, _file_bytes(counters))
        finally:
            os.close(descriptor)
        # The view keeps the address valid as long as this object lives.
        self._words = (ctypes.c_uint32 * (len(self._memory) // 4)).from_buffer(self._memory)
        self._notes = (ctypes.c_uint64 * (len(self._memory) // 8)).from_buffer(self._memory)
        self._address = ctypes.addressof(self._words)
        self._on_device = pin_host_memory(self._address, len(self._memory))
        # Memory that is still pinned must not be unmapped: its address may be used again.
        self._unpin = finalize(self, _unpin, self._address, self._words)
        self._unpin.atexit = False

    def address(self, counter: int) -> int:
        """Return where the device finds a counter."""
        return self._on_device + counter * _LINE_BYTES

    def read(self, counter: int) -> int:
        """Return the value of a counter."""
        return self._words[counter * _LINE_BYTES // 4]

    def set(self, counter: int, value: int) -> None:
        """Set a counter from the host."""
        self._words[counter * _LINE_BYTES // 4] = value % (1 << _WORD_BITS)

    def note(self, counter: int, word: int) -> None:
        """Write a word of twice the size for other hosts, in place of a counter of devices."""
        self._notes[counter * _LINE_BYTES // 8] = word

    def noted(self, counter: int) -> int:
        """Return the word that a host has written, or 0."""
        return self._notes[counter * _LINE_BYTES // 8]

    def release(self, counter: int, awaited: int) -> None:
        """Set a counter so far beyond an awaited value that no device waits for it any more."""
        self.set(counter, awaited + (1 << (_WORD_BITS - 2)))

    def close(self) -> None:
        """Unpin the memory; call it when no stream of this process uses a counter any more."""
        self._unpin()


def remove_flags_file(name: str) -> None:
    """Remove the name of a file that all processes have opened."""
    (_FOLDER / Path(name).name).unlink(missing_ok=True)


def _unpin(address: int, words: object) -> None:
    """Unpin memory, which lives until then because this call holds it."""
    del words
    with suppress(DriverError):
        unpin_host_memory(address)


def _file_bytes(counters: int) -> int:
    return -(-counters * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
