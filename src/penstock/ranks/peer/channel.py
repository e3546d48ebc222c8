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
from penstock.ranks.peer.flags import Counters, SharedFlags
from penstock.ranks.peer.release_rules import LastQueued, has_reached, may_overwrite, may_read_nan
from penstock.ranks.peer.ring import Ring, RingEntry
from penstock.ranks.peer.streams import take_stream

__all__ = ["PeerReceiver", "PeerSender", "RingMemory", "on_device"]


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
        other: int,
    ) -> None:
        self.device = device
        self.memory = memory
        self._flags = flags
        self._counters = counters
        self._ready = flags.address(counters.ready)
        self._freed = flags.address(counters.freed)
        self._ring = Ring(memory.capacity)
        self._is_aborted = False
        # Whether the training thread is about to queue something, past the check for an abort.
        self.is_queueing = False
        # The word in which the other end leaves its note.
        self._other = other

    def use_ring(self, memory: RingMemory) -> None:
        """Continue in other memory; every message so far has been copied out of the old one."""
        self.memory = memory
        self._ring = Ring(memory.capacity, entries=self._ring.entries)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream in which this end's messages are, if there were any."""
        raise NotImplementedError

    def abort(self) -> None:
        """Let no further message be sent or received, because a rank is gone or this one ends."""
        self._is_aborted = True

    def announce_end(self) -> None:
        """Report to the other end what was queued last; after an abort, when that is known."""
        raise NotImplementedError

    @property
    def is_waiting(self) -> bool:
        """Whether something that was queued here is not done, as far as the counters show."""
        raise NotImplementedError

    @property
    def other(self) -> LastQueued:
        """What the other end has queued last, as far as it has reported that."""
        return LastQueued.from_word(self._flags.noted(self._other))

    @property
    def counts(self) -> tuple[int, int]:
        """Both counters, which change when a device has done something."""
        return self._flags.read(self._counters.ready), self._flags.read(self._counters.freed)

    def release(self) -> None:
        """Let the device continue, whatever it waits for."""
        raise NotImplementedError

    def _begin_queueing(self) -> None:
        # In this order: whoever aborts, and then sees that nothing is being queued, knows that
        # nothing will be.
        self.is_queueing = True
        if self._is_aborted:
            self.is_queueing = False
            raise LinkLostError("the channel was aborted because a rank is gone")


class PeerSender(_End):
    """The end of a channel that sends."""

    def __init__(
        self, device: torch.device, memory: RingMemory, flags: SharedFlags, counters: Counters
    ) -> None:
        super().__init__(device, memory, flags, counters, counters.taken)
        self._side = take_stream(self.device)
        self._is_unordered = False
        # How many entries there were at the end of the last step.
        self._offered = 0
        self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped upstream

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that copies, in which nothing else is."""
        return self._side

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Sent:
        """Copy a tensor into the ring as soon as it is made and there is room."""
        del peer, tag
        (tensor,) = tensors
        self._begin_queueing()
        try:
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
        finally:
            self.is_queueing = False
        return _SENT

    def order_copies(self) -> None:
        """Let the current stream continue only when everything sent so far was copied.

        Until then nothing may write to what was sent: an input that a stage passed on, a buffer.
        """
        self._offered = self._ring.entries
        if self._is_unordered:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
            self._is_unordered = False

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        """Refuse: messages come by the channel of the other direction."""
        raise NotImplementedError("this end of the channel sends")

    def release(self) -> None:
        """Let the device continue, whatever it waits for."""
        self._flags.release(self._counters.freed, self._ring.entries)

    def announce_end(self) -> None:
        """Report to the receiver what was queued last."""
        self._flags.note(self._counters.sent, LastQueued(self._ring.entries, True).to_word())

    @property
    def is_waiting(self) -> bool:
        """Whether something was not copied yet."""
        return not has_reached(self._flags.read(self._counters.ready), self._ring.entries)

    def may_overwrite(self, *, is_given_up: bool, is_gone: bool) -> bool:
        """Return whether waits for room may end, because nobody counts on what they protect."""
        return may_overwrite(
            self.entries_freed,
            self.other,
            offered=self._offered,
            is_given_up=is_given_up,
            is_gone=is_gone,
        )

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
    entries: Sequence[RingEntry]
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
        super().__init__(device, memory, flags, counters, counters.sent)
        self._arrivals: _Arrivals = deque()
        self._stream: torch.cuda.Stream | None = None
        # Whether the training thread is about to give a message a place in the ring.
        self.is_placing = False
        # The last entry that the device was given to take, ever and in a step that is complete.
        self._taken = self._completed = 0

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
        self.is_placing = True
        try:
            self._begin_queueing()
            arrival = _Arrival(self, tensor, self._ring.place(tensor.nbytes))
            self._arrivals.append(arrival)
        finally:
            self.is_queueing = self.is_placing = False
        return arrival

    def take_until(self, arrival: _Arrival) -> None:
        """Take messages out of the ring in the order in which they were sent, up to this one."""
        self._begin_queueing()
        try:
            with on_device(self.device):
                stream = self._current_stream()
                while not arrival.is_taken:
                    self._take(self._arrivals.popleft(), stream)
        finally:
            self.is_queueing = False

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
            self._taken = number
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

    def end_step(self) -> None:
        """Report to the sender what this step has queued, before it can be complete."""
        note = LastQueued(self._taken, self._is_aborted)
        self._flags.note(self._counters.taken, note.to_word())

    def complete_step(self) -> None:
        """Count on what was queued so far, unless waits for it may end by now."""
        # In this order: either whoever ends waits sees this, or the step fails.
        self._completed = self._taken
        if self._is_aborted:
            raise LinkLostError("the channel was aborted because a rank is gone")

    def announce_end(self) -> None:
        """Report to the sender what was queued last."""
        self._flags.note(self._counters.taken, LastQueued(self._taken, True).to_word())

    @property
    def is_waiting(self) -> bool:
        """Whether something was not taken yet."""
        return not has_reached(self._flags.read(self._counters.freed), self._taken)

    def may_read_nan(self, *, is_given_up: bool, is_gone: bool) -> bool:
        """Return whether waits for messages may end, once the ring is filled with NaN."""
        return may_read_nan(
            self._flags.read(self._counters.freed),
            self.other,
            completed=self._completed,
            oldest_kept=self._ring.oldest_kept,
            is_given_up=is_given_up,
            is_gone=is_gone,
        )

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
