"""What a process holds, and whether that grows from case to case."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import sleep

import torch

__all__ = ["Footprint", "Ledger", "ignoring_existing_objects", "measure_footprint"]

# The first cases load and start what is needed once.
_WARM_UP = 6
# Resident memory is the median of a window of cases, and may grow by this many bytes, because the
# C library keeps freed memory in pieces and cases differ in size.
_WINDOW = 20
_MOST_GROWTH = 48 * 2**20
# Threads of a closed process group end a moment later: how often to look again.
_LOOKS = 40
_SECONDS_BETWEEN_LOOKS = 0.05

_PROCESS = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds: live tensors and their bytes, threads, open files, children, memory.

    What the system does not report is 0.
    """

    tensors: int
    tensor_bytes: int
    threads: int
    files: int
    children: int
    resident_bytes: int

    @property
    def counts(self) -> dict[str, int]:
        """The counts that must not grow at all."""
        return {
            "live tensors": self.tensors,
            "bytes in tensors": self.tensor_bytes,
            "threads": self.threads,
            "open files": self.files,
            "child processes": self.children,
        }


def measure_footprint() -> Footprint:
    """Return what this process holds after garbage collection."""
    _empty_caches()
    gc.collect()
    # Not isinstance, which reads `__class__` of every object: some give a warning.
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return Footprint(
        tensors=len(tensors),
        tensor_bytes=sum(tensor.untyped_storage().nbytes() for tensor in storages.values()),
        threads=_count(_PROCESS / "task") or threading.active_count(),
        files=_count(Path("/dev/fd")),
        children=_count_children(),
        resident_bytes=_resident_bytes(),
    )


def _empty_caches() -> None:
    """Empty our own caches, which are bounded and therefore not a leak."""
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("penstock.") else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _count(folder: Path) -> int:
    try:
        return len(list(folder.iterdir()))
    except OSError:
        return 0


def _count_children() -> int:
    try:
        return sum(len(file.read_text().split()) for file in _PROCESS.glob("task/*/children"))
    except OSError:
        return 0


def _resident_bytes() -> int:
    try:
        return int((_PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@contextmanager
def ignoring_existing_objects() -> Iterator[None]:
    """Let garbage collection ignore what exists already, so that looking is faster."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(slots=True)
class Ledger:
    """The footprints of one process, case after case."""

    footprints: list[Footprint] = field(default_factory=list)

    def settle(self) -> Footprint:
        """Measure and note the footprint, once this process had a moment to free what it can."""
        self.footprints.append(measure_footprint())
        for _ in range(_LOOKS):
            if not self.find_leaks():
                break
            sleep(_SECONDS_BETWEEN_LOOKS)
            self.footprints[-1] = measure_footprint()
        return self.footprints[-1]

    def find_leaks(self) -> list[str]:
        """Return what has grown since the warm-up: any count, or memory by more than allowed."""
        if len(self.footprints) <= _WARM_UP:
            return []
        first, last = self.footprints[_WARM_UP - 1].counts, self.footprints[-1].counts
        leaks = [
            f"{name}: {first[name]} after {_WARM_UP} cases, {last[name]} now"
            for name in first
            if last[name] > first[name]
        ]
        memory = [footprint.resident_bytes for footprint in self.footprints[_WARM_UP:]]
        if len(memory) >= 2 * _WINDOW:
            before, now = median(memory[:_WINDOW]), median(memory[-_WINDOW:])
            if now - before > _MOST_GROWTH:
                leaks.append(
                    f"resident memory: {before / 2**20:.0f} MiB, {now / 2**20:.0f} MiB now"
                )
        return leaks
