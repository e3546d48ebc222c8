"""Copies between a device and its host: pinned memory and streams of their own on CUDA.

    compute stream    F0 | F1 |  wait | F2 | take | B1 | wait | B0
    to the host          |-- F0 --|
    to the device                               |-- F0 --|

The host of a rank never waits here: streams wait for each other. Host memory is kept from step to
step, because pinning it takes long. On a CPU, copies are made at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["CopyEngine", "HostMemory"]


@dataclass(slots=True)
class HostMemory:
    """Memory of the host for one piece of saved data, and the copy back that last read it."""

    bytes: torch.Tensor
    last_read: torch.cuda.Event | None = None


class CopyEngine:
    """Copies of one device, in both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: torch.cuda.Stream | None = None
        self._back: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # upstream
            self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # upstream
        self._free: dict[int, list[HostMemory]] = {}
        self.host_bytes = 0

    def begin_out(
        self, sources: Sequence[torch.Tensor]
    ) -> tuple[list[HostMemory], torch.cuda.Event | None]:
        """Begin to copy bytes to the host, behind what the current stream does now."""
        memories = [self._take(source.nbytes) for source in sources]
        if self._out is None:
            for memory, source in zip(memories, sources, strict=True):
                memory.bytes.copy_(source)
            return memories, None
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for memory, source in zip(memories, sources, strict=True):
                if memory.last_read is not None:
                    self._out.wait_event(memory.last_read)
                memory.bytes.copy_(source, non_blocking=True)
            return memories, self._out.record_event()

    def begin_back(
        self, memories: Sequence[HostMemory]
    ) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Take memory on the device, and begin to copy bytes back into it."""
        targets = [torch.empty_like(memory.bytes, device=self._device) for memory in memories]
        if self._back is None:
            for memory, target in zip(memories, targets, strict=True):
                target.copy_(memory.bytes)
            return targets, None
        # What used this memory before may still be running in the current stream.
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            for memory, target in zip(memories, targets, strict=True):
                target.copy_(memory.bytes, non_blocking=True)
            return targets, self._back.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait until a copy has ended."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def release(self, memories: Sequence[HostMemory], event: torch.cuda.Event | None) -> None:
        """Give host memory back once a copy from it has ended."""
        for memory in memories:
            memory.last_read = event
            self._free.setdefault(memory.bytes.nbytes, []).append(memory)

    def _take(self, size: int) -> HostMemory:
        if free := self._free.get(size):
            return free.pop()
        self.host_bytes += size
        is_pinned = self._device.type == "cuda"
        return HostMemory(torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned))
