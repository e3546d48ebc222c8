"""Channels through peer memory between the ranks of one machine, as long as a pipeline uses them.

Rings get the size that the first step shows to be needed, and grow when messages do.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from threading import current_thread
from weakref import finalize

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
    use_context,
)
from penstock.ranks.peer.opening import BLOCK_BYTES, Pair, PeerChannels, open_peer_channels
from penstock.ranks.peer.release import abort, mark_queued, wait_until
from penstock.ranks.peer.streams import give_back_stream

__all__ = ["PeerMemory"]

# How long a pipeline that is dropped, and not closed, waits for its device.
_DROP_SECONDS = 10.0
# How long closing waits for others to let go of this rank's rings.
_UNMAP_SECONDS = 1.0


class PeerMemory:
    """This rank's channels through peer memory, on one CUDA device."""

    def __init__(self, control: GroupControl, device: torch.device) -> None:
        self._control = control
        self._device = torch.empty(0, device=device).device
        self._channels = PeerChannels()
        # The largest size that each ring was ever asked to have.
        self._wanted: dict[Pair, int] = {}
        self._finalizer = finalize(self, _drop, self._channels)

    def open(self, pairs: Sequence[Pair]) -> None:
        """Open the channels that can be; every rank gives the same pairs in the same order."""
        with on_device(self._device):
            _clean_up()
            self._channels = open_peer_channels(self._control, self._device, pairs)
        # Also where the pipeline is dropped and not closed; a process that ends frees everything.
        self._finalizer = finalize(self, _drop, self._channels)
        self._finalizer.atexit = False
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

    # ---- the size of rings, by both ends of a channel

    def make_room(self, wanted: Mapping[Pair, int]) -> None:
        """Give rings these sizes; both ends call it, and no message is on its way.

        After that rings only grow. Where memory is short a ring keeps its size, and long messages
        go through it in pieces.
        """
        with on_device(self._device):
            for pair in sorted(wanted):
                if wanted[pair] <= self._wanted.get(pair, 0):
                    continue
                self._wanted[pair] = wanted[pair]
                capacity = -(-wanted[pair] // BLOCK_BYTES) * BLOCK_BYTES
                sender, receiver = (
                    self._channels.senders.get(pair),
                    self._channels.receivers.get(pair),
                )
                if sender is not None and sender.memory.capacity != capacity:
                    self._follow(sender, pair[1])
                if receiver is not None and receiver.memory.capacity != capacity:
                    self._resize(receiver, pair[0], capacity)

    def _resize(self, receiver: PeerReceiver, source: int, capacity: int) -> None:
        """Offer another ring to the sender, and use it if the sender does."""
        address = 0
        try:
            address = allocate(capacity)
            handle = export_memory(address)
        except DriverError:
            if address:
                free(address)
            self._control.send(source, None)
            return
        memory = RingMemory(address, capacity)
        self._control.send(source, [handle.hex(), capacity])
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

    def order_copies(self) -> None:
        """Let what comes next in the current stream wait until everything sent was copied."""
        for sender in self._channels.senders.values():
            sender.order_copies()

    def end_step(self) -> None:
        """Order the copies, and let senders know what this rank's device will read."""
        self.order_copies()
        for receiver in self._channels.receivers.values():
            receiver.end_step()

    def complete_step(self) -> None:
        """Count on what was read in a step that all ranks have completed."""
        for receiver in self._channels.receivers.values():
            receiver.complete_step()

    def abort(self, lost: int | None = None) -> None:
        """End waits of this rank's device, because a rank is gone; any thread may call this."""
        abort(self._channels, lost)

    def close(self) -> None:
        """Let the device finish, and free what this rank shares with others.

        That takes as long as it takes. If a rank is gone, `abort` ends the waits for it.
        """
        if self._finalizer.detach() is not None:
            with on_device(self._device), suppress(RuntimeError):
                _finish(self._channels, inf)


def _drop(channels: PeerChannels) -> None:
    """Close the channels of a pipeline that was dropped; any thread may collect it."""
    if not channels.ends:
        return
    with suppress(RuntimeError):
        use_context(channels.context)
        # The thread that ends waits must not wait for its own end.
        is_busy = channels.release_thread is current_thread()
        if is_busy or not _finish(channels, _DROP_SECONDS):
            # The device continues without us, and what it needs must stay.
            _BUSY.append(channels)


def _finish(channels: PeerChannels, seconds: float) -> bool:
    """Free what the device does not need any more, if it gets there in time."""
    for end in channels.ends:
        end.abort()
        end.announce_end()
    is_done = mark_queued(channels)
    # The thread that ends waits may fill a ring until it ends.
    if not wait_until(lambda: is_done() and not channels.is_releasing, seconds):
        return False
    for sender in channels.senders.values():
        unmap_memory(sender.memory.address)
        sender.note_unmapped()
    receivers = channels.receivers
    wait_until(lambda: all(end.is_unmapped for end in receivers.values()), _UNMAP_SECONDS)
    for (source, _), receiver in receivers.items():
        # The device of a rank that is only silent may still write there.
        if channels.is_gone(source):
            receiver.forget_sender()
        _MAPPED.append(receiver)
    _free_unmapped()
    streams = [sender.stream for sender in channels.senders.values()]
    own = [] if channels.release_stream is None else [channels.release_stream]
    for stream in [*streams, *own]:
        give_back_stream(stream)
    if channels.flags is not None:
        channels.flags.close()
    return True


def _clean_up() -> None:
    """Free what earlier pipelines could not free when they ended."""
    waiting, _BUSY[:] = tuple(_BUSY), ()
    _BUSY.extend(channels for channels in waiting if not _finish(channels, 0.0))
    _free_unmapped()


def _free_unmapped() -> None:
    """Free the rings of closed channels, once their senders have let go of them."""
    # Taken out first: a collected pipeline may get here in the middle of it.
    rings, _MAPPED[:] = tuple(_MAPPED), ()
    for receiver in rings:
        if receiver.is_unmapped:
            free(receiver.memory.address)
        else:
            _MAPPED.append(receiver)


# Channels whose pipeline is gone while the device still uses them, and rings of closed channels
# that others may still have mapped.
_BUSY: list[PeerChannels] = []
_MAPPED: list[PeerReceiver] = []
