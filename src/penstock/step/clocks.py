"""Recorded steps: marks that cost nothing while the step runs, seconds afterwards."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol

import torch

from penstock.ranks.transport import Carrier, Message
from penstock.step.step_data import StepRecording
from penstock.tensors.packet import Packet

__all__ = ["Clock", "CudaClock", "HostClock", "StepRecorder", "clock_for"]

# A number for each start of a Linux machine, and what processes share if they share its clocks.
_BOOT, _CLOCKS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")


class Clock(Protocol):
    """A source of marks, which it later converts to seconds since its start.

    `began` is its start on the host's clock, which processes of one machine have in common.
    """

    began: float

    def mark(self) -> Any:
        """Mark the current moment."""

    def mark_arrival(self, message: Message, carrier: Carrier) -> Any:
        """Mark when a message that was just handed over has reached its rank."""

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds since the clock was made; called after the step."""

    def held_bytes(self) -> float:
        """Return the bytes in use on the device now, or 0 where they are not counted."""


class HostClock:
    """The host's clock, which is right where work is finished when a call returns."""

    def __init__(self) -> None:
        self.began = perf_counter()

    def mark(self) -> float:
        """Return the time now."""
        return perf_counter()

    def mark_arrival(self, message: Message, carrier: Carrier) -> float:
        """Return the time now, because what is carried by the host has arrived by then."""
        del message, carrier
        return perf_counter()

    def seconds(self, mark: float) -> float:
        """Return the time since the start."""
        return mark - self.began

    def held_bytes(self) -> float:
        """Return 0, because host memory is not counted."""
        return 0.0


class CudaClock:
    """Events in the current stream, which mark when the device gets there, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By channel, streams that do nothing but wait for its messages.
        self._waiting: dict[tuple[int, int], torch.cuda.Stream] = {}
        torch.cuda.synchronize(device)
        self._zero = self.mark()
        self.began = perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Record an event after what is in the stream so far."""
        return _mark_in(torch.cuda.current_stream(self._device))

    def mark_arrival(self, message: Message, carrier: Carrier) -> torch.cuda.Event:
        """Record an event in the stream that copies, or in one that waits for the send.

        A send of NCCL is in a stream that torch keeps to itself. The stream of the compute must
        not wait for it, and neither must that of another channel.
        """
        if carrier is None:
            return self.mark()
        if isinstance(carrier, torch.cuda.Stream):
            return _mark_in(carrier)
        channel = message.source, message.destination
        if channel not in self._waiting:
            self._waiting[channel] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # upstream
        with torch.cuda.stream(self._waiting[channel]):
            carrier.wait()
        return _mark_in(self._waiting[channel])

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return the device's time since the start."""
        mark.synchronize()
        return float(self._zero.elapsed_time(mark)) / 1e3

    def held_bytes(self) -> float:
        """Return what the caching allocator has handed out."""
        return float(torch.cuda.memory_allocated(self._device))


def _mark_in(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # upstream
    event.record(stream)
    return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on this device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class StepRecorder:
    """The marks of one step: of its actions, of its waits for messages, and of its sends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: list[int] = []
        self._memory: list[float] = []
        self._marks: list[tuple[Any, Any]] = []
        # By thread: overlapped actions run in several.
        self._started: dict[int, Any] = {}
        self._waits: dict[Message, tuple[Any, Any]] = {}
        self._arrivals: dict[Message, Any] = {}

    def start(self) -> None:
        """Mark the start of an action; what comes before its last mark does not count."""
        self._started[get_ident()] = self._clock.mark()

    def end(self, row: int) -> None:
        """Mark the end of the action that was started."""
        self._marks.append((self._started[get_ident()], self._clock.mark()))
        self._rows.append(row)
        self._memory.append(self._clock.held_bytes())

    def wait(self, message: Message, receive: Callable[[Message], Packet]) -> Packet:
        """Receive a message, and mark when the rank does nothing but wait for it."""
        begin = self._clock.mark()
        packet = receive(message)
        self._waits[message] = begin, self._clock.mark()
        return packet

    def note_sent(self, message: Message, carrier: Carrier) -> None:
        """Mark when a message reaches its rank, of several tensors the last one."""
        self._arrivals[message] = self._clock.mark_arrival(message, carrier)

    def finish(self) -> StepRecording:
        """Return the recording in seconds; on a device this waits for the step."""
        seconds = self._clock.seconds
        return StepRecording(
            self._rows,
            [seconds(start) for start, _ in self._marks],
            [seconds(end) for _, end in self._marks],
            self._memory,
            [(*_name(m), seconds(begin), seconds(end)) for m, (begin, end) in self._waits.items()],
            [(*_name(message), seconds(mark)) for message, mark in self._arrivals.items()],
            began=self._clock.began,
            machine=_find_machine(),
        )


@cache
def _find_machine() -> str:
    """Return a name for what has one clock for all its processes; empty if it is not known."""
    try:
        return _BOOT.read_text().strip() + str(_CLOCKS.readlink())
    except OSError:
        return ""


def _name(message: Message) -> tuple[bool, int, int]:
    """Return how the ranks name a message: its direction, edge and microbatch."""
    return message.is_forward, message.edge, message.microbatch
