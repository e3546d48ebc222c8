"""One direction between two ranks of a machine, through device memory that both can reach.

    sender's side stream        wait until freed  | copy into the ring | ready = n
    receiver's current stream   wait until ready  | copy out of it     | freed = n

The devices do all of it: no multiprocessor waits, and no host takes part.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from penstock.ranks.faults import NAN_BYTE, LinkLostError
from penstock.ranks.peer.driver import copy, fill, wait_for_value, write_value
from penstock.ranks.peer.flags import SharedFlags
from penstock.ranks.peer.ring import Entry, Ring
from penstock.ranks.peer.streams import take_stream

__all__ = ["Counters", "PeerReceiver", "PeerSender", "RingMemory", "on_device"]


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one channel: entries that are ready, entries that are freed, and the end."""

    ready: int
    freed: int
    unmapped: int

    @classmethod
    def of(cls, channel: int) -> "Counters":
        """Return the counters of a channel by its number."""
        return cls(3 * channel, 3 * channel + 1, 3 * channel + 2)


@dataclass(frozen=True, slots=True)
class RingMemory:
    """The memory of a ring as this process sees it."""

    address: int
    capacity: int


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a device current, as the calls of the driver need it."""
    if torch.cuda.current_device() == device.index:
        yield
        return
    with torch.cuda.device(device):
        yield


class _Sent:
    """A send that nobody has to wait for: the allocator keeps its memory until it is copied."""

    def wait(self) -> None:
        """Do nothing."""


_SENT = _Sent()


class _End:
    """What both ends of a channel have in common."""

    def __init__(
        self,
        device: torch.device,
        memory: RingMemory,
        flags: SharedFlags,
        counters: Counters,
    ) -> None:
        self.device = device
        self.memory = memory
        self._flags = flags
        self._counters = counters
        self._ready = flags.address(counters.ready)
        self._freed = flags.address(counters.freed)
        self._ring = Ring(memory.capacity)
        self._is_aborted = False

    def use_ring(self, memory: RingMemory) -> None:
        """Continue in other memory; every message so far has been copied out of the old one."""
        self.memory = memory
        self._ring = Ring(memory.capacity, entries=self._ring.entries)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream in which this end's messages are, if there were any."""
        raise NotImplementedError

    def abort(self) -> None:
        """Let no further message be sent or received, because a rank is gone."""
        self._is_aborted = True

    def release(self) -> None:
        """Let the device continue, whatever it waits for."""
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._is_aborted:
            raise LinkLostError("the channel was aborted because a rank is gone")


class PeerSender(_End):
    """The end of a channel that sends."""

    def __init__(
        self, device: torch.device, memory: RingMemory, flags: SharedFlags, counters: Counters
    ) -> None:
        super().__init__(device, memory, flags, counters)
        self._side = take_stream(self.device)
        self._is_unordered = False
        self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped upstream

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that copies, in which nothing else is."""
        return self._side

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Sent:
        """Copy a tensor into the ring as soon as it is made and there is room."""
        del peer, tag
        (tensor,) = tensors
        self._require_open()
        source, stream, ring = tensor.data_ptr(), self._side.cuda_stream, self.memory.address
        with on_device(self.device):
            self._made.record(torch.cuda.current_stream(self.device))
            self._side.wait_event(self._made)
            for number, start, size, offset, after in self._ring.place(tensor.nbytes):
                if after:
                    wait_for_value(stream, self._freed, after)
                copy(ring + offset, source + start, size, stream)
                write_value(stream, self._ready, number)
            tensor.record_stream(self._side)
        self._is_unordered = True
        return _SENT

    def order_copies(self) -> None:
        """Let the current stream continue only when everything sent so far was copied.

        Until then nothing may write to what was sent: an input that a stage passed on, a buffer.
        """
        if self._is_unordered:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            self._is_unordered = False

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Refuse: messages come by the channel of the other direction."""
        raise NotImplementedError("this end of the channel sends")

    def release(self) -> None:
        """Let the device continue, whatever it waits for."""
        self._flags.release(self._counters.freed, self._ring.entries)

    @property
    def entries_freed(self) -> int:
        """How many entries the receiver has freed."""
        return self._flags.read(self._counters.freed)

    def note_unmapped(self) -> None:
        """Let the receiver know that it may free the ring."""
        self._flags.set(self._counters.unmapped, 1)


@dataclass(slots=True, eq=False)
class _Arrival:
    """A tensor that is to be received."""

    receiver: "PeerReceiver"
    tensor: torch.Tensor
    entries: Sequence[Entry]
    is_taken: bool = False

    def wait(self) -> None:
        """Let the current stream wait for the tensor."""
        self.receiver.take_until(self)


_Arrivals: TypeAlias = deque[_Arrival]


class PeerReceiver(_End):
    """The end of a channel that receives; the ring is in its own memory."""

    def __init__(
        self, device: torch.device, memory: RingMemory, flags: SharedFlags, counters: Counters
    ) -> None:
        super().__init__(device, memory, flags, counters)
        self._arrivals: _Arrivals = deque()
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that took the last message."""
        return self._stream

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Refuse: messages leave by the channel of the other direction."""
        raise NotImplementedError("this end of the channel receives")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Arrival:
        """Note where the next message goes; waiting for it puts it there."""
        del peer, tag
        (tensor,) = tensors
        self._require_open()
        arrival = _Arrival(self, tensor, self._ring.place(tensor.nbytes))
        self._arrivals.append(arrival)
        return arrival

    def take_until(self, arrival: _Arrival) -> None:
        """Take messages out of the ring in the order in which they were sent, up to this one."""
        self._require_open()
        with on_device(self.device):
            stream = self._current_stream()
            while not arrival.is_taken:
                self._take(self._arrivals.popleft(), stream)

    def _current_stream(self) -> int:
        """Return the current stream, which continues after what this channel did in another."""
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        handle: int = stream.cuda_stream
        return handle

    def _take(self, arrival: _Arrival, stream: int) -> None:
        target, ring = arrival.tensor.data_ptr(), self.memory.address
        for number, start, size, offset, _ in arrival.entries:
            wait_for_value(stream, self._ready, number)
            copy(target + start, ring + offset, size, stream)
            write_value(stream, self._freed, number)
        arrival.is_taken = True

    def spoil(self, stream: int) -> None:
        """Make what never arrived NaN, so that no number looks right that is not."""
        fill(self.memory.address, NAN_BYTE, self.memory.capacity, stream)

    def release(self) -> None:
        """Let the device continue, whatever it waits for."""
        self._flags.release(self._counters.ready, self._ring.entries)

    def forget_sender(self) -> None:
        """Free the ring without the sender, which is gone."""
        self._flags.set(self._counters.unmapped, 1)

    @property
    def entries_ready(self) -> int:
        """How many entries the sender has written."""
        return self._flags.read(self._counters.ready)

    @property
    def is_unmapped(self) -> bool:
        """Whether the sender has let go of the ring."""
        return self._flags.read(self._counters.unmapped) != 0
