"""How ranks of one machine open channels through peer memory: offer, map, try, keep what works.

Each receiver allocates a ring and lets its sender map it. The counters of all channels are in a
file that the ranks of a machine share. A channel is kept if a message came through and was freed,
so that whatever a machine does not support is found here, and the pair of ranks uses another way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock, Thread
from time import monotonic, sleep
from typing import TypeAlias

import torch

from penstock.ranks.control import GroupControl
from penstock.ranks.faults import LinkLostError
from penstock.ranks.peer.channel import PeerReceiver, PeerSender, RingMemory
from penstock.ranks.peer.driver import (
    DriverError,
    allocate,
    current_context,
    export_memory,
    free,
    map_memory,
    unmap_memory,
)
from penstock.ranks.peer.flags import (
    COUNTERS_PER_CHANNEL,
    Counters,
    SharedFlags,
    create_flags_file,
    machine_id,
    remove_flags_file,
)
from penstock.ranks.peer.processes import PeerProcess, process_name
from penstock.ranks.peer.streams import take_stream

__all__ = ["BLOCK_BYTES", "Pair", "PeerChannels", "open_peer_channels"]

# Two ranks, source first.
Pair: TypeAlias = tuple[int, int]

# What the driver hands out at least: the handle of a smaller piece of memory would show its
# neighbours too.
BLOCK_BYTES = 2**21
# The size of a ring until the first step has shown what it must hold, where memory allows. Longer
# messages go in pieces, and a stream takes only about a thousand entries before its host waits.
_FIRST_BYTES = 2**26
# How long the first message of a channel may take.
_TRIAL_SECONDS = 10.0
_LOOK_SECONDS = 0.001


@dataclass(slots=True)
class PeerChannels:
    """The channels of one rank that were opened, and why others on its machine were not."""

    senders: dict[Pair, PeerSender] = field(default_factory=dict)
    receivers: dict[Pair, PeerReceiver] = field(default_factory=dict)
    refusals: dict[Pair, str] = field(default_factory=dict)
    flags: SharedFlags | None = None
    # For the thread that acts when a rank is gone: a stream with nothing in it, and the context.
    release_stream: torch.cuda.Stream | None = None
    context: int = 0
    # Taken by the first thread that aborts, and the thread that ends waits since then.
    abort_once: Lock = field(default_factory=Lock)
    release_thread: Thread | None = None
    # Of the other ranks on this machine.
    processes: dict[int, PeerProcess] = field(default_factory=dict)

    @property
    def ends(self) -> list[PeerSender | PeerReceiver]:
        """Both kinds of ends."""
        return [*self.senders.values(), *self.receivers.values()]

    @property
    def is_releasing(self) -> bool:
        """Whether a thread ends waits of the device, for which it may fill rings."""
        return self.release_thread is not None and self.release_thread.is_alive()

    def is_gone(self, rank: int) -> bool:
        """Return whether the process of a rank has ended for certain."""
        return rank in self.processes and self.processes[rank].is_gone


def open_peer_channels(
    control: GroupControl, device: torch.device, pairs: Sequence[Pair]
) -> PeerChannels:
    """Open the channels of this rank; every rank gives the same pairs in the same order."""
    opening = _Opening(control, device, pairs)
    rings = opening.offer_rings()
    name = opening.share_flags()
    try:
        opening.connect(rings, name)
        opening.agree_on_refusals()
        opening.try_out()
        opening.agree_on_refusals()
    finally:
        if name is not None:
            remove_flags_file(name)
    return opening.finish()


class _Opening:
    """The channels of this rank while they are opened."""

    def __init__(self, control: GroupControl, device: torch.device, pairs: Sequence[Pair]) -> None:
        self._control = control
        self._device = device
        self._number = {pair: number for number, pair in enumerate(pairs)}
        self._own = [pair for pair in pairs if control.rank in pair]
        self._near: list[Pair] = []
        self._machines: list[str | None] = []
        self._memories: dict[Pair, RingMemory] = {}
        self._found = PeerChannels()

    def offer_rings(self) -> list[dict[str, tuple[str, int]]]:
        """Return handle and size of every rank's rings, by rank and then by the ring's sender."""
        rank, offered, machine, name, error = self._control.rank, {}, None, "", ""
        try:
            for pair in self._own:
                if pair[1] == rank:
                    memory = self._memories[pair] = _allocate_ring()
                    handle = export_memory(memory.address).hex()
                    offered[str(pair[0])] = handle, memory.capacity
            machine, name = machine_id(), process_name()
        except (DriverError, OSError) as problem:
            error = str(problem)
        offers = self._control.gather([machine, offered, error, name])
        self._machines = [offer[0] for offer in offers]
        for source, destination in self._own:
            reason = offers[source][2] or offers[destination][2]
            if reason:
                self._found.refusals[source, destination] = reason
            elif self._machines[source] == self._machines[destination]:
                self._near.append((source, destination))
                other = destination if source == rank else source
                self._found.processes[other] = PeerProcess(offers[other][3])
        return [offer[1] for offer in offers]

    def share_flags(self) -> str | None:
        """Return the file of counters that the first rank of this machine has created."""
        mine = self._machines[self._control.rank]
        name: str | None = None
        is_first = mine is not None and self._machines.index(mine) == self._control.rank
        if is_first and len(self._number) > 0:
            try:
                name = create_flags_file(COUNTERS_PER_CHANNEL * len(self._number))
            except OSError:
                name = None
        names: list[str | None] = self._control.gather(name)
        return None if mine is None else names[self._machines.index(mine)]

    def connect(self, rings: Sequence[Mapping[str, tuple[str, int]]], name: str | None) -> None:
        """Map what the others offer, make both ends, and send the first message."""
        if name is None or not self._near:
            self._refuse_all("no memory can be shared on this machine")
            return
        try:
            flags = SharedFlags(name, COUNTERS_PER_CHANNEL * len(self._number))
            self._found.release_stream = take_stream(self._device)
            self._found.context = current_context()
        except (RuntimeError, OSError) as error:
            self._refuse_all(str(error))
            return
        self._found.flags = flags
        self._try_each(lambda pair: self._make_end(pair, rings, flags))

    def _make_end(
        self, pair: Pair, rings: Sequence[Mapping[str, tuple[str, int]]], flags: SharedFlags
    ) -> None:
        source, destination = pair
        counters = Counters.of(self._number[pair])
        if destination == self._control.rank:
            memory = self._memories[pair]
            self._found.receivers[pair] = PeerReceiver(self._device, memory, flags, counters)
            return
        handle, capacity = rings[destination][str(source)]
        memory = RingMemory(map_memory(bytes.fromhex(handle)), capacity)
        sender = self._found.senders[pair] = PeerSender(self._device, memory, flags, counters)
        sender.send([_first_message(pair, self._device)], 0, 0)

    def try_out(self) -> None:
        """Receive the first message of each channel, and wait until it is freed."""
        self._try_each(self._hear)
        self._try_each(self._wait_until_freed)

    def _hear(self, pair: Pair) -> None:
        receiver = self._found.receivers.get(pair)
        if receiver is None:
            return
        _poll(lambda: receiver.entries_ready >= 1)
        expected = _first_message(pair, self._device)
        heard = torch.zeros_like(expected)
        receiver.recv([heard], 0, 0).wait()
        if heard.tolist() != expected.tolist():
            raise DriverError(f"the first message was {heard.tolist()[:2]} instead of {pair}")

    def _wait_until_freed(self, pair: Pair) -> None:
        sender = self._found.senders.get(pair)
        if sender is not None:
            _poll(lambda: sender.entries_freed >= 1)

    def agree_on_refusals(self) -> None:
        """Give up a channel on both sides if one side cannot use it."""
        mine = [[*pair, reason] for pair, reason in self._found.refusals.items()]
        for theirs in self._control.gather(mine):
            for source, destination, reason in theirs:
                if (source, destination) in self._near:
                    self._refuse((source, destination), reason)

    def finish(self) -> PeerChannels:
        """Free what is not used, and return the rest."""
        torch.cuda.synchronize(self._device)
        for pair in self._found.refusals:
            sender = self._found.senders.pop(pair, None)
            if sender is not None:
                unmap_memory(sender.memory.address)
            self._found.receivers.pop(pair, None)
        # Nobody maps what is freed any more.
        self._control.gather(None)
        for pair, memory in self._memories.items():
            if pair not in self._found.receivers:
                free(memory.address)
        return self._found

    def _try_each(self, do: Callable[[Pair], None]) -> None:
        for pair in tuple(self._near):
            try:
                do(pair)
            except (RuntimeError, LinkLostError, OSError, KeyError, ValueError) as error:
                # Whatever is wrong, memory of the device included, the other ranks must learn it.
                self._refuse(pair, str(error))

    def _refuse_all(self, reason: str) -> None:
        for pair in tuple(self._near):
            self._refuse(pair, reason)

    def _refuse(self, pair: Pair, reason: str) -> None:
        self._near.remove(pair)
        self._found.refusals[pair] = reason


def _allocate_ring() -> RingMemory:
    """Return the largest ring that there is memory for."""
    capacity = _FIRST_BYTES
    while True:
        try:
            return RingMemory(allocate(capacity), capacity)
        except DriverError:
            if capacity == BLOCK_BYTES:
                raise
            capacity //= 2


def _first_message(pair: Pair, device: torch.device) -> torch.Tensor:
    return torch.tensor([*pair, *range(62)], dtype=torch.int64, device=device)


def _poll(is_done: Callable[[], bool]) -> None:
    end = monotonic() + _TRIAL_SECONDS
    while not is_done():
        if monotonic() > end:
            raise DriverError(f"the first message did not arrive within {_TRIAL_SECONDS:g} s")
        sleep(_LOOK_SECONDS)
