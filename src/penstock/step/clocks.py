"""Clocks for recorded steps: marks that cost nothing while the step runs, seconds afterwards."""

from time import perf_counter
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """A source of marks, which it later converts to seconds since its start."""

    def mark(self) -> Any:
        """Mark the current moment."""

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds since the clock was made; called after the step."""

    def held_bytes(self) -> float:
        """Return the bytes in use on the device now, or 0 where they are not counted."""


class HostClock:
    """The host's clock, which is right where work is finished when a call returns."""

    def __init__(self) -> None:
        self._zero = perf_counter()

    def mark(self) -> float:
        """Return the time now."""
        return perf_counter()

    def seconds(self, mark: float) -> float:
        """Return the time since the start."""
        return mark - self._zero

    def held_bytes(self) -> float:
        """Return 0, because host memory is not counted."""
        return 0.0


class CudaClock:
    """Events in the current stream, which mark when the device gets there, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Record an event after what is in the stream so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # upstream
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return the device's time since the start."""
        mark.synchronize()
        return float(self._zero.elapsed_time(mark)) / 1e3

    def held_bytes(self) -> float:
        """Return what the caching allocator has handed out."""
        return float(torch.cuda.memory_allocated(self._device))


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on this device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
