"""Channels through peer memory between the ranks of one machine, as long as a pipeline uses them.

Rings grow when messages do. When a rank is gone, the others end the waits of their own devices.
"""

import atexit
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep
from weakref import WeakSet

import torch

from penstock.ranks.control import GroupControl
from penstock.ranks.peer.channel import PeerReceiver, PeerSender, RingMemory, on_device
from penstock.ranks.peer.driver import (
    DriverError,
    allocate,
    export_memory,
    free,
    map_memory,
    unmap_memory,
)
from penstock.ranks.peer.opening import BLOCK_BYTES, Pair, PeerChannels, open_peer_channels

__all__ = ["PeerMemory"]

# How long closing waits for the device, and for others to let go of this rank's rings.
_DRAIN_SECONDS = 10.0
_UNMAP_SECONDS = 2.0
# How long waits are ended again and again: other survivors may still write counters.
_RELEASE_SECONDS = 30.0
_LOOK_SECONDS = 0.005


class PeerMemory:
    """This rank's channels through peer memory, on one CUDA device."""

    def __init__(self, control: GroupControl, device: torch.device) -> None:
        self._control = control
        self._device = torch.empty(0, device=device).device
        self._channels = PeerChannels()
        self._is_aborted = self._is_closed = False
        _OPEN.add(self)

    def open(self, pairs: Sequence[Pair]) -> None:
        """Open the channels that can be; every rank gives the same pairs in the same order."""
        with on_device(self._device):
            self._channels = open_peer_channels(self._control, self._device, pairs)
        for (source, destination), reason in self._channels.refusals.items():
            warnings.warn(
                f"rank {source} cannot send to rank {destination} through peer memory ({reason}); "
                "their messages use the backend of the process group, which takes part of the "
                "device from the compute beside it",
                stacklevel=2,
            )

    def find(self, pair: Pair) -> PeerSender | PeerReceiver | None:
        """Return this rank's end of a channel, if it is open."""
        return self._channels.senders.get(pair) or self._channels.receivers.get(pair)

    @property
    def ring_bytes(self) -> int:
        """The device memory that this rank's rings take, beside what torch has allocated."""
        return sum(end.memory.capacity for end in self._channels.receivers.values())

    # ---- growing, by both ends of a channel

    def make_room(self, wanted: Mapping[Pair, int]) -> None:
        """Enlarge rings to at least these sizes; both ends call it, and no message is on its way.

        Where memory is short a ring keeps its size, and long messages go through it in pieces.
        """
        with on_device(self._device):
            for pair in sorted(wanted):
                sender, receiver = (
                    self._channels.senders.get(pair),
                    self._channels.receivers.get(pair),
                )
                if sender is not None and sender.memory.capacity < wanted[pair]:
                    self._follow(sender, pair[1])
                if receiver is not None and receiver.memory.capacity < wanted[pair]:
                    self._enlarge(receiver, pair[0], wanted[pair])

    def _enlarge(self, receiver: PeerReceiver, source: int, size: int) -> None:
        """Offer a larger ring to the sender, and use it if the sender does."""
        capacity = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        try:
            memory = RingMemory(allocate(capacity), capacity)
        except DriverError:
            self._control.send(source, None)
            return
        self._control.send(source, [export_memory(memory.address).hex(), capacity])
        is_used = self._control.receive(source)
        torch.cuda.synchronize(self._device)
        unused = memory.address
        if is_used:
            unused = receiver.memory.address
            receiver.use_ring(memory)
        free(unused)

    def _follow(self, sender: PeerSender, destination: int) -> None:
        """Use the ring that the receiver offers, if it can be mapped."""
        offer = self._control.receive(destination)
        if offer is None:
            return
        handle, capacity = offer
        sender.stream.synchronize()
        try:
            memory = RingMemory(map_memory(bytes.fromhex(handle)), capacity)
        except DriverError:
            self._control.send(destination, False)
            return
        unmap_memory(sender.memory.address)
        sender.use_ring(memory)
        self._control.send(destination, True)

    # ---- the end

    def abort(self) -> None:
        """End every wait of this rank's device; any thread may call this."""
        ends = self._ends()
        for end in ends:
            end.abort()
        if ends and not self._is_aborted:
            self._is_aborted = True
            Thread(target=self._keep_releasing, name="penstock-release", daemon=True).start()

    def _keep_releasing(self) -> None:
        ends, limit = self._ends(), monotonic() + _RELEASE_SECONDS
        with suppress(RuntimeError), on_device(self._device):
            while not self._is_closed and monotonic() < limit and not all(e.is_idle for e in ends):
                sleep(_LOOK_SECONDS)
                for end in ends:
                    end.release()

    def close(self) -> None:
        """Let the device finish, and free what this rank shares with others."""
        if self._is_closed:
            return
        channels, ends = self._channels, self._ends()
        with suppress(RuntimeError), on_device(self._device):
            self.drain()
            for sender in channels.senders.values():
                unmap_memory(sender.memory.address)
                sender.note_unmapped()
            receivers = channels.receivers.values()
            _wait_until(lambda: all(r.is_unmapped for r in receivers), _UNMAP_SECONDS)
            for receiver in receivers:
                # A ring that is still mapped is left to the driver, unless its sender is gone.
                if receiver.is_unmapped or self._is_aborted:
                    free(receiver.memory.address)
            if channels.flags is not None:
                channels.flags.close()
        self._is_closed = True
        self._channels = PeerChannels()
        for end in ends:
            end.abort()

    def drain(self) -> None:
        """Wait until the device has sent and taken everything, but not for ranks that are gone."""
        ends = self._ends()
        if not _wait_until(lambda: all(end.is_idle for end in ends), _DRAIN_SECONDS):
            self.abort()
            _wait_until(lambda: all(end.is_idle for end in ends), _UNMAP_SECONDS)

    def _ends(self) -> list[PeerSender | PeerReceiver]:
        return [*self._channels.senders.values(), *self._channels.receivers.values()]


def _wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    limit = monotonic() + seconds
    while not is_done():
        if monotonic() > limit:
            return False
        sleep(_LOOK_SECONDS)
    return True


def _drain_all() -> None:
    """Let other ranks have the last messages of a process that ends without closing."""
    for memory in list(_OPEN):
        with suppress(RuntimeError):
            memory.drain()


# A process that ends takes back what its device has not sent yet.
_OPEN: WeakSet[PeerMemory] = WeakSet()
atexit.register(_drain_all)
