"""Channels through peer memory between the ranks of one machine, as long as a pipeline uses them.

Rings grow when messages do. When a rank is gone, the others end the waits of their own devices,
which then read NaN where no message came.
"""

import atexit
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from time import monotonic, sleep
from weakref import WeakSet, finalize

import torch

from penstock.ranks.control import GroupControl
from penstock.ranks.peer.channel import PeerReceiver, PeerSender, RingMemory, on_device
from penstock.ranks.peer.driver import (
    DriverError,
    allocate,
    export_memory,
    free,
    is_stream_idle,
    map_memory,
    unmap_memory,
)
from penstock.ranks.peer.opening import BLOCK_BYTES, Pair, PeerChannels, open_peer_channels
from penstock.ranks.peer.streams import give_back_stream

__all__ = ["PeerMemory"]

# How long closing waits for the device, and for others to let go of this rank's rings.
_DRAIN_SECONDS = 10.0
_UNMAP_SECONDS = 1.0
# How long rings are given to be filled with NaN.
_SPOIL_SECONDS = 0.5
# How long waits are ended again and again: other survivors may still write counters.
_RELEASE_SECONDS = 30.0
_LOOK_SECONDS = 0.005


class PeerMemory:
    """This rank's channels through peer memory, on one CUDA device."""

    def __init__(self, control: GroupControl, device: torch.device) -> None:
        self._control = control
        self._device = torch.empty(0, device=device).device
        self._channels = PeerChannels()
        self._finalizer = finalize(self, _close, self._channels, self._device)

    def open(self, pairs: Sequence[Pair]) -> None:
        """Open the channels that can be; every rank gives the same pairs in the same order."""
        with on_device(self._device):
            _free_unmapped()
            self._channels = open_peer_channels(self._control, self._device, pairs)
        # Also where the pipeline is dropped and not closed; a process that ends frees everything.
        self._finalizer = finalize(self, _close, self._channels, self._device)
        self._finalizer.atexit = False
        _OPEN.add(self)
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
        _abort(self._channels)

    def drain(self) -> None:
        """Wait until the device has sent and taken everything, but not for ranks that are gone."""
        _drain(self._channels)

    def close(self) -> None:
        """Let the device finish, and free what this rank shares with others."""
        self._finalizer()


def _abort(channels: PeerChannels) -> None:
    if not channels.is_aborted:
        with suppress(DriverError):
            _spoil(channels)
    for end in channels.ends:
        end.abort()
    if channels.ends and not channels.is_aborted:
        channels.is_aborted = True
        keep_releasing = Thread(
            target=_keep_releasing, args=(channels.ends,), name="penstock-release", daemon=True
        )
        keep_releasing.start()


def _spoil(channels: PeerChannels) -> None:
    """Fill the rings with NaN before any stream reads from them what was never sent."""
    if channels.rescue is None:
        return
    # A thread that has not used the device yet has no context.
    torch.cuda.set_device(channels.rescue.device)
    rescue = channels.rescue.cuda_stream
    for receiver in channels.receivers.values():
        receiver.spoil(rescue)
    _wait_until(lambda: is_stream_idle(rescue), _SPOIL_SECONDS)


def _keep_releasing(ends: Sequence[PeerSender | PeerReceiver]) -> None:
    limit = monotonic() + _RELEASE_SECONDS
    while monotonic() < limit and not all(end.is_idle for end in ends):
        sleep(_LOOK_SECONDS)
        for end in ends:
            end.release()


def _drain(channels: PeerChannels) -> None:
    def is_idle() -> bool:
        return all(end.is_idle for end in channels.ends)

    if not _wait_until(is_idle, _DRAIN_SECONDS):
        _abort(channels)
        _wait_until(is_idle, _UNMAP_SECONDS)


def _close(channels: PeerChannels, device: torch.device) -> None:
    with suppress(RuntimeError), on_device(device):
        _drain(channels)
        for sender in channels.senders.values():
            unmap_memory(sender.memory.address)
            sender.note_unmapped()
        receivers = channels.receivers.values()
        _wait_until(lambda: all(receiver.is_unmapped for receiver in receivers), _UNMAP_SECONDS)
        for receiver in receivers:
            if channels.is_aborted:
                receiver.forget_sender()
            _MAPPED.append(receiver)
        _free_unmapped()
        streams = [sender.stream for sender in channels.senders.values()]
        for stream in [*streams, *([] if channels.rescue is None else [channels.rescue])]:
            give_back_stream(stream)
        if channels.flags is not None:
            channels.flags.close()


def _free_unmapped() -> None:
    """Free the rings of closed channels, once their senders have let go of them."""
    for receiver in [receiver for receiver in _MAPPED if receiver.is_unmapped]:
        _MAPPED.remove(receiver)
        free(receiver.memory.address)


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
        memory.drain()


# Rings of closed channels that others may still have mapped.
_MAPPED: list[PeerReceiver] = []
# A process that ends takes back what its device has not sent yet.
_OPEN: WeakSet[PeerMemory] = WeakSet()
atexit.register(_drain_all)
