"""Channels on which messages are matched by order alone.

A channel is peer memory between ranks of one machine, or else a group of two. The n-th tensor that
its source starts to send is the n-th that its destination starts to receive.
"""

import atexit
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from threading import Thread
from time import monotonic, sleep
from typing import TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist

from penstock.ranks.channels import Channels, TaggedChannels
from penstock.ranks.control import GroupControl
from penstock.ranks.faults import LinkLostError
from penstock.ranks.peer.channel import PeerSender
from penstock.ranks.peer.memory import PeerMemory
from penstock.ranks.private_groups import NcclWire, StartedWork, Wire, open_gloo
from penstock.ranks.transport import Message, NoteSent

__all__ = ["OrderedChannels", "is_carried_on_device", "make_channels"]

# Connects two ranks, source first.
OpenPair: TypeAlias = Callable[[tuple[int, int]], Wire]

# The ranks within the group of a channel, which has two members.
_SENDER, _RECEIVER = 0, 1
# A message takes this many multiprocessors from the compute beside it, for as long as it waits.
_NCCL_BLOCKS = 1
# How long a process that ends without closing waits for its device.
_EXIT_SECONDS = 600.0
_LOOK_SECONDS = 0.002
# The only tag on a channel where messages are matched by order.
_NO_TAG = 0


class OrderedChannels:
    """A wire per direction; a tensor is found by its number on its channel.

    That is `peer_memory` where it can be opened, and elsewhere a group of two.
    """

    def __init__(
        self, open_pair: OpenPair, device: torch.device, peer_memory: PeerMemory | None = None
    ) -> None:
        self._open_pair = open_pair
        self._peer_memory = peer_memory
        self._wires: dict[tuple[int, int], Wire] = {}
        self._are_groups_aborted = False
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._note_sent: NoteSent | None = None
        self.has_tags = False
        self.device = device

    def open(self, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect each pair and let its source send its numbers.

        Backends connect when the first tensor goes over a channel, and block the host until the
        other end does the same. So that happens here, in one order on all ranks.
        """
        if self._peer_memory is not None:
            self._peer_memory.open(pairs)
        for pair in pairs:
            if rank in pair:
                peer = self._find_peer(pair)
                self._wires[pair] = peer or self._open_pair(pair)
                # Peer memory has had its first message.
                if peer is None:
                    self._greet(rank, pair)
        _OPEN.add(self)

    def _find_peer(self, pair: tuple[int, int]) -> Wire | None:
        return None if self._peer_memory is None else self._peer_memory.find(pair)

    @property
    def routes(self) -> dict[tuple[int, int], str]:
        """What carries the messages of each channel of this rank."""
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        return {pair: "peer memory" if self._find_peer(pair) else backend for pair in self._wires}

    def _greet(self, rank: int, pair: tuple[int, int]) -> None:
        name = torch.tensor(pair, device=self.device)
        try:
            if rank == pair[_SENDER]:
                self._wires[pair].send([name], _RECEIVER, _NO_TAG).wait()
                return
            heard = torch.zeros_like(name)
            self._wires[pair].recv([heard], _SENDER, _NO_TAG).wait()
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error
        if tuple(heard.tolist()) != pair:
            raise LinkLostError(
                f"the channel from rank {pair[0]} to rank {pair[1]} must begin with these numbers "
                f"(got {heard.tolist()})"
            )

    def send(self, message: Message, tensor: torch.Tensor) -> StartedWork:
        """Start to send a tensor, the next one of its channel."""
        self._sent[message.destination] += 1
        wire = self._wires[message.source, message.destination]
        try:
            work = wire.send([_as_bytes(tensor)], _RECEIVER, _NO_TAG)
            if self._note_sent is not None:
                self._note_sent(message, wire.stream if isinstance(wire, PeerSender) else work)
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error
        return work

    def receive(self, message: Message, tensor: torch.Tensor) -> StartedWork:
        """Start to receive a tensor, the next one of its channel."""
        self._received[message.source] += 1
        wire = self._wires[message.source, message.destination]
        try:
            return wire.recv([_as_bytes(tensor)], _SENDER, _NO_TAG)
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def number_to_send(self, message: Message) -> int:
        """Return how many tensors were sent on this message's channel since it was opened."""
        return self._sent[message.destination]

    def number_to_receive(self, message: Message) -> int:
        """Return how many receives were started on this message's channel since it was opened."""
        return self._received[message.source]

    def watch_sends(self, note: NoteSent | None) -> None:
        """Call `note` for what is sent from now on, if a device carries it; or stop that."""
        self._note_sent = None if self.device.type == "cpu" else note

    def make_room(self, sizes: Mapping[tuple[int, int], int]) -> None:
        """Enlarge peer memory where messages of this many bytes are in flight."""
        if self._peer_memory is not None:
            self._peer_memory.make_room(sizes)

    def end_step(self) -> None:
        """Let the current stream wait for copies into peer memory."""
        if self._peer_memory is not None:
            self._peer_memory.end_step()

    def complete_step(self) -> None:
        """Count on what peer memory has carried, unless a rank is gone."""
        if self._peer_memory is not None:
            self._peer_memory.complete_step()

    def abort(self, lost: int | None = None) -> None:
        """End what the device waits for, in peer memory and in NCCL's kernels."""
        if self._peer_memory is not None:
            self._peer_memory.abort(lost)
        if self.device.type != "cpu":
            self._abort_groups()

    def close(self) -> None:
        """Free peer memory, and the communicators of NCCL, which takes long by collection."""
        self.wait_for_device()
        if self.device.type != "cpu":
            self._abort_groups()
        if self._peer_memory is not None:
            self._peer_memory.close()

    def wait_for_device(self, seconds: float = inf) -> None:
        """Wait for what is queued; where a rank is gone, `abort` lets the device continue."""
        if self.device.type != "cpu" and self._wires:
            with suppress(RuntimeError):
                _wait_for_stream(self.device, seconds)

    def _abort_groups(self) -> None:
        """Abort every communicator, once.

        All at the same time: aborting one waits for the device, and so for receives of the others
        that will never be answered, unless these are aborted as well.
        """
        if self._are_groups_aborted:
            return
        self._are_groups_aborted = True
        groups = [wire for pair, wire in self._wires.items() if self._find_peer(pair) is not wire]
        threads = [Thread(target=group.abort, daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _wait_for_stream(device: torch.device, seconds: float) -> None:
    """Wait for what is in the current stream, in a way that signals can interrupt."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped upstream
    event.record(torch.cuda.current_stream(device))
    limit = monotonic() + seconds
    while not event.query() and monotonic() < limit:  # type: ignore[no-untyped-call]  # untyped upstream
        sleep(_LOOK_SECONDS)


def is_carried_on_device(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether messages stay on the device; gloo takes them through pinned host memory."""
    return dist.get_backend(group) != "gloo" and device.type != "cpu"


def make_channels(
    group: dist.ProcessGroup,
    control: GroupControl,
    device: torch.device,
    *,
    by_order: bool,
    uses_peer_memory: bool,
) -> Channels:
    """Return the channels for tensors on this device, none connected yet.

    With `by_order` those of gloo are matched by order too, as a test of it.
    """
    if is_carried_on_device(group, device):
        peer_memory = PeerMemory(control, device) if uses_peer_memory else None
        return OrderedChannels(
            lambda pair: NcclWire(group, pair, device, _NCCL_BLOCKS), device, peer_memory
        )
    if by_order:
        return OrderedChannels(
            lambda pair: open_gloo(group, control.connections, pair), torch.device("cpu")
        )
    return TaggedChannels(control.gloo)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes, because some backends do not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _wait_for_devices() -> None:
    """Let other ranks have the last messages of a process that ends without closing."""
    for channels in list(_OPEN):
        channels.wait_for_device(_EXIT_SECONDS)


_OPEN: WeakSet[OrderedChannels] = WeakSet()
atexit.register(_wait_for_devices)
