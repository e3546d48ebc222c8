"""Channels between ranks: every direction of a pair of ranks has its own.

Gloo's messages have tags, so that all channels share one group. Other backends match messages by
order alone: there each channel is a group of two, and the n-th tensor that its source starts to
send is the n-th that its destination starts to receive.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import PrivateGroup, open_gloo, open_nccl
from penstock.ranks.transport import Message

__all__ = ["Channels", "OrderedChannels", "TaggedChannels", "header_tag", "open_pairs"]

# Connects two ranks, source first.
OpenPair: TypeAlias = Callable[[tuple[int, int]], PrivateGroup]

# The ranks within the group of a channel, which has two members.
_SENDER, _RECEIVER = 0, 1
# The only tag on a channel where messages are matched by order.
_NO_TAG = 0


class Channels(Protocol):
    """Carries the tensors of messages, each contiguous and of at least one element."""

    @property
    def has_tags(self) -> bool:
        """Whether messages are matched with receives by name; otherwise by order."""

    @property
    def device(self) -> torch.device:
        """Where tensors must be to be sent or received."""

    def open(self, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect pairs of ranks; every rank gives the same pairs in the same order."""

    def send(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        """Start to send a tensor."""

    def receive(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        """Start to receive a tensor."""

    def number_to_send(self, message: Message) -> int:
        """Return how many tensors were sent on this message's channel since it was opened."""

    def number_to_receive(self, message: Message) -> int:
        """Return how many receives were started on this message's channel since it was opened."""

    def abort(self) -> None:
        """End operations that aborted connections do not end; any thread may call this."""


class TaggedChannels:
    """All channels in one gloo group, where a message is found by its tag."""

    def __init__(self, gloo: PrivateGroup) -> None:
        self._gloo = gloo
        self.has_tags = True
        self.device = torch.device("cpu")

    def open(self, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing, because the group is connected."""

    def send(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        """Start to send a tensor."""
        try:
            return self._gloo.send([tensor], message.destination, _data_tag(message))
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def receive(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        """Start to receive a tensor."""
        try:
            return self._gloo.recv([tensor], message.source, _data_tag(message))
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def number_to_send(self, message: Message) -> int:
        """Return 0, because messages with names are not counted."""
        del message
        return 0

    def number_to_receive(self, message: Message) -> int:
        """Return 0, because messages with names are not counted."""
        del message
        return 0

    def abort(self) -> None:
        """Do nothing, because aborted connections end every operation of gloo."""


class OrderedChannels:
    """A group of two per direction; a tensor is found by its number on its channel."""

    def __init__(self, open_pair: OpenPair, device: torch.device) -> None:
        self._open_pair = open_pair
        self._groups: dict[tuple[int, int], PrivateGroup] = {}
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self.has_tags = False
        self.device = device

    def open(self, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect each pair and let its source send its numbers.

        Backends connect when the first tensor goes over a channel, and block the host until the
        other end does the same. So that happens here, in one order on all ranks.
        """
        for pair in pairs:
            if rank in pair:
                self._groups[pair] = self._open_pair(pair)
                self._greet(rank, pair)

    def _greet(self, rank: int, pair: tuple[int, int]) -> None:
        name = torch.tensor(pair, device=self.device)
        try:
            with warnings.catch_warnings():
                # Torch warns of a communicator that is made for two ranks, which is what we want.
                warnings.filterwarnings("ignore", message=".*unbatched P2P op")
                if rank == pair[_SENDER]:
                    self._groups[pair].send([name], _RECEIVER, _NO_TAG).wait()
                    return
                heard = torch.zeros_like(name)
                self._groups[pair].recv([heard], _SENDER, _NO_TAG).wait()
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error
        if tuple(heard.tolist()) != pair:
            raise LinkLostError(
                f"the channel from rank {pair[0]} to rank {pair[1]} must begin with these numbers "
                f"(got {heard.tolist()})"
            )

    def send(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        """Start to send a tensor, the next one of its channel."""
        self._sent[message.destination] += 1
        group = self._groups[message.source, message.destination]
        try:
            return group.send([_as_bytes(tensor)], _RECEIVER, _NO_TAG)
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def receive(self, message: Message, tensor: torch.Tensor) -> dist.Work:
        """Start to receive a tensor, the next one of its channel."""
        self._received[message.source] += 1
        group = self._groups[message.source, message.destination]
        try:
            return group.recv([_as_bytes(tensor)], _SENDER, _NO_TAG)
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def number_to_send(self, message: Message) -> int:
        """Return how many tensors were sent on this message's channel since it was opened."""
        return self._sent[message.destination]

    def number_to_receive(self, message: Message) -> int:
        """Return how many receives were started on this message's channel since it was opened."""
        return self._received[message.source]

    def abort(self) -> None:
        """End pending operations of NCCL, which aborted connections do not end.

        All at once: aborting a communicator waits for the device, and so for receives of the
        others that will never be answered, unless these are aborted as well.
        """
        if self.device.type == "cpu":
            return
        threads = [Thread(target=group.abort, daemon=True) for group in self._groups.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def open_pairs(
    group: dist.ProcessGroup, connections: Connections, device: torch.device
) -> OrderedChannels:
    """Return channels of two ranks each, for tensors on this device; none is connected yet."""
    if device.type == "cpu":
        return OrderedChannels(lambda pair: open_gloo(group, connections, pair), device)
    return OrderedChannels(lambda pair: open_nccl(group, pair), device)


def header_tag(message: Message) -> int:
    """Return the tag of a message's header, in a group that carries tensors too."""
    return _data_tag(message) + 2


def _data_tag(message: Message) -> int:
    return 4 * (message.edge * 65536 + message.microbatch) + message.is_forward


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes, because some backends do not support every dtype."""
    return tensor.view(-1).view(torch.uint8)
