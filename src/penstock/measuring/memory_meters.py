"""How many bytes are in use before, after and at most during a piece of work."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.measuring.live_memory import LiveMemory

__all__ = ["MemoryMeter", "MemoryReading", "meter_for"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The bytes in use before a piece of work and after it, and the most while it ran."""

    before: int
    after: int
    peak: int

    @property
    def left(self) -> int:
        """The bytes that are in use because of the work; negative if it freed some."""
        return self.after - self.before

    @property
    def workspace(self) -> int:
        """The bytes that were needed only while the work ran."""
        return max(0, self.peak - max(self.before, self.after))


class MemoryMeter(Protocol):
    """A meter of what work does to the memory of a device."""

    def measure(self, work: Callable[[], None]) -> MemoryReading:
        """Do the work, and return the bytes around it."""


class _StorageMeter:
    """A meter that counts the storages of tensors that were made while it measured."""

    def __init__(self) -> None:
        self._live = LiveMemory()

    def measure(self, work: Callable[[], None]) -> MemoryReading:
        before = self._live.bytes()
        with self._live.counting() as peak_so_far:
            work()
            peak = peak_so_far()
        return MemoryReading(before, self._live.bytes(), peak)


class _CudaMeter:
    """A meter that asks the caching allocator, which also sees what kernels allocate."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, work: Callable[[], None]) -> MemoryReading:
        # Garbage that Python collects inside would look as if the work had freed it.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            work()
            after = torch.cuda.memory_allocated(self._device)
        finally:
            if was_collecting:
                gc.enable()
        return MemoryReading(before, after, torch.cuda.max_memory_allocated(self._device))


def meter_for(device: torch.device) -> MemoryMeter:
    """Return the best meter for this device; on CUDA it resets the peak statistics."""
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter()
