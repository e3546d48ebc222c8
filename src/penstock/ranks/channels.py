"""Channels between ranks: every direction of a pair of ranks has its own.

Gloo's messages have tags, so that all channels share one group, as here. Elsewhere messages are
matched by order alone (`ordered_channels`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import PrivateGroup, StartedWork
from penstock.ranks.transport import Message, NoteSent

__all__ = ["Channels", "TaggedChannels", "header_tag"]


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

    def send(self, message: Message, tensor: torch.Tensor) -> StartedWork:
        """Start to send a tensor."""

    def receive(self, message: Message, tensor: torch.Tensor) -> StartedWork:
        """Start to receive a tensor."""

    def number_to_send(self, message: Message) -> int:
        """Return how many tensors were sent on this message's channel since it was opened."""

    def number_to_receive(self, message: Message) -> int:
        """Return how many receives were started on this message's channel since it was opened."""

    @property
    def routes(self) -> Mapping[tuple[int, int], str]:
        """What carries the messages of each channel of this rank."""

    def watch_sends(self, note: NoteSent | None) -> None:
        """Call `note` for what is sent from now on, if a device carries it; or stop that."""

    def make_room(self, sizes: Mapping[tuple[int, int], int]) -> None:
        """Prepare channels for messages of this many bytes in flight; every rank calls it."""

    def end_step(self) -> None:
        """Let nothing that comes after a step change what it has sent, before that has left."""

    def complete_step(self) -> None:
        """Count on what a step has received, which has succeeded on all ranks.

        Raises an error if a rank is gone by now, since what is still to come may be cut off.
        """

    def abort(self, lost: int | None = None) -> None:
        """End waits of the device for a rank that is gone, if one is known; from any thread.

        These do not end when connections are aborted.
        """

    def wait_for_device(self) -> None:
        """Wait until the device has sent and received everything that is queued."""

    def close(self) -> None:
        """Free what the channels hold."""


class TaggedChannels:
    """All channels in one gloo group, where a message is found by its tag."""

    def __init__(self, gloo: PrivateGroup) -> None:
        self._gloo = gloo
        self.has_tags = True
        self.device = torch.device("cpu")
        self.routes: dict[tuple[int, int], str] = {}

    def open(self, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Note the channels; the group is connected."""
        self.routes = dict.fromkeys([pair for pair in pairs if rank in pair], "gloo")

    def send(self, message: Message, tensor: torch.Tensor) -> StartedWork:
        """Start to send a tensor."""
        try:
            return self._gloo.send([tensor], message.destination, _data_tag(message))
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def receive(self, message: Message, tensor: torch.Tensor) -> StartedWork:
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

    def watch_sends(self, note: NoteSent | None) -> None:
        """Do nothing, because the sender does not see when gloo's messages arrive."""

    def make_room(self, sizes: Mapping[tuple[int, int], int]) -> None:
        """Do nothing, because gloo takes any message."""

    def end_step(self) -> None:
        """Do nothing, because sends were waited for."""

    def complete_step(self) -> None:
        """Do nothing, because receives were waited for."""

    def abort(self, lost: int | None = None) -> None:
        """Do nothing, because aborted connections end every operation of gloo."""

    def wait_for_device(self) -> None:
        """Do nothing, because no device takes part."""

    def close(self) -> None:
        """Do nothing, because the group belongs to the control of the ranks."""


def header_tag(message: Message) -> int:
    """Return the tag of a message's header, in a group that carries tensors too."""
    return _data_tag(message) + 2


def _data_tag(message: Message) -> int:
    return 4 * (message.edge * 65536 + message.microbatch) + message.is_forward
