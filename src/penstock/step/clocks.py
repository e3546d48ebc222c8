"""Clocks for recorded steps: marks that cost nothing while the step runs, seconds afterwards."""

from time import perf_counter
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "NoClock", "clock_for"]


class Clock(Protocol):
    """Makes marks, and turns them into seconds since it was started, and bytes."""

    def mark(self) -> Any:
        """A moment."""

    def seconds(self, mark: Any) -> float:
        """When that was, in seconds since the clock was made; called after the step."""

    def held_bytes(self) -> float:
        """The bytes in use on the device now, or 0 where nobody counts them."""


class NoClock:
    """For steps that nobody records."""

    def mark(self) -> float:
        """Nothing."""
        return 0.0

    def seconds(self, mark: float) -> float:
        """Nothing."""
        return mark

    def held_bytes(self) -> float:
        """Nothing."""
        return 0.0


class HostClock:
    """The clock of the processor: right where work is done when a call returns."""

    def __init__(self) -> None:
        self._zero = perf_counter()

    def mark(self) -> float:
        """The time now."""
        return perf_counter()

    def seconds(self, mark: float) -> float:
        """The time since the start."""
        return mark - self._zero

    def held_bytes(self) -> float:
        """The processor's memory is not counted."""
        return 0.0


class CudaClock:
    """Events in the current stream: when the device gets there, not when the host does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """An event behind what the stream was given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # upstream
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """The device's time since the start."""
        mark.synchronize()
        return float(self._zero.elapsed_time(mark)) / 1e3

    def held_bytes(self) -> float:
        """What the caching allocator has given out."""
        return float(torch.cuda.memory_allocated(self._device))


def clock_for(device: torch.device) -> Clock:
    """The clock that tells when work on this device is done."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
