"""How many bytes a piece of work needs: before it, after it, and at most meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.measuring.live_memory import LiveMemory

__all__ = ["MemoryMeter", "Reading", "meter_for"]


@dataclass(frozen=True, slots=True)
class Reading:
    """The bytes in use before a piece of work and after it, and the most while it ran."""

    before: int
    after: int
    peak: int

    @property
    def left(self) -> int:
        """The bytes that are in use because of the work; below zero if it gave some back."""
        return self.after - self.before

    @property
    def workspace(self) -> int:
        """The bytes that were needed only while the work ran."""
        return max(0, self.peak - max(self.before, self.after))


class MemoryMeter(Protocol):
    """Reads off what work does to the memory of a device."""

    def measure(self, work: Callable[[], None]) -> Reading:
        """Do the work, and tell."""


class _StorageMeter:
    """Counts the storages of the tensors that were made in work that was watched."""

    def __init__(self) -> None:
        self._live = LiveMemory()

    def measure(self, work: Callable[[], None]) -> Reading:
        before = self._live.bytes()
        with self._live.watching() as most:
            work()
            peak = most()
        return Reading(before, self._live.bytes(), peak)


class _CudaMeter:
    """Asks the caching allocator, which sees what kernels ask for, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, work: Callable[[], None]) -> Reading:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        after = torch.cuda.memory_allocated(self._device)
        return Reading(before, after, torch.cuda.max_memory_allocated(self._device))


def meter_for(device: torch.device) -> MemoryMeter:
    """The meter that sees most on this device; on CUDA it starts the peak statistics anew."""
    return _CudaMeter(device) if device.type == "cuda" else _StorageMeter()
