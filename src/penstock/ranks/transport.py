"""How values get from rank to rank: the interface, and one for all ranks in one process.

A transport carries the packets (activations) and gradients of a step, each named by a `Message`.
Small values that ranks exchange beside them travel by `ranks/control.py`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

import torch

from penstock.ranks.private_groups import StartedWork
from penstock.tensors.packet import Packet
from penstock.tensors.plain import plain_value

__all__ = ["Carrier", "LocalTransport", "Message", "NoteSent", "Transport"]


class Message(NamedTuple):
    """One value between two ranks: along which edge, for which microbatch, in which direction."""

    is_forward: bool
    edge: int
    microbatch: int
    source: int
    destination: int


# What carries a tensor that was handed over: a stream that copies it, a send that can be waited
# for, or nothing, if it was copied in the current stream.
Carrier: TypeAlias = torch.cuda.Stream | StartedWork | None
NoteSent: TypeAlias = Callable[[Message, Carrier], None]


class Transport(Protocol):
    """A carrier of messages between the ranks of a schedule, of which this process runs some."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this process runs."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the schedule."""

    @property
    def has_unknown_hooks(self) -> bool:
        """Whether this step has sent tensors with hooks that their receivers do not know of."""

    def begin_step(self, signature: bytes) -> None:
        """Start a step; a signature seen before promises the shapes that it had then."""

    def send(self, message: Message, packet: Packet) -> None:
        """Send a packet; its tensors must not be written to afterwards."""

    def send_failure(self, message: Message) -> None:
        """Announce that a packet will not come; do nothing if it was sent."""

    def post_receive(self, message: Message) -> None:
        """Prepare to receive a message; doing so again changes nothing."""

    def receive(self, message: Message) -> Packet:
        """Wait for a message that was posted, and return it."""

    def discard(self, message: Message) -> None:
        """Take a message that is no longer needed, if it is on its way."""

    def release_sends(self) -> None:
        """Hold no message back, because this rank now waits for another by other means."""

    def end_step(self) -> None:
        """Wait until everything has been sent."""

    def watch_sends(self, note: NoteSent | None) -> None:
        """Call `note` for what is sent from now on, if its arrival can be known; or stop that."""

    def remember_shapes(self) -> None:
        """Remember the shapes of this step, which has succeeded on all ranks."""

    def forget_shapes(self) -> None:
        """Forget the shapes of this step, which has failed on some rank."""


class LocalTransport:
    """A transport with every rank of the schedule in this process, which copies messages."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ranks = tuple(range(num_ranks))
        # Packets say of themselves what has hooks.
        self.has_unknown_hooks = False
        self._inbox: dict[Message, Packet] = {}
        self._note_sent: NoteSent | None = None

    def begin_step(self, signature: bytes) -> None:
        """Start with an empty inbox, even if the last step failed half-way."""
        del signature
        self._inbox.clear()

    def send(self, message: Message, packet: Packet) -> None:
        """Copy the packet, so that no rank can write to another's memory."""
        copies = [_copy(tensor) for tensor in packet.tensors]
        self._inbox[message] = Packet(packet.structure, copies, packet.hooked)
        if self._note_sent is not None:
            self._note_sent(message, None)

    def send_failure(self, message: Message) -> None:
        """Do nothing: in one process a failure ends the step."""

    def post_receive(self, message: Message) -> None:
        """Do nothing: the inbox takes any message."""

    def receive(self, message: Message) -> Packet:
        """Return a message that was sent."""
        return self._inbox.pop(message)

    def discard(self, message: Message) -> None:
        """Forget a message."""
        self._inbox.pop(message, None)

    def release_sends(self) -> None:
        """Do nothing: messages have arrived."""

    def end_step(self) -> None:
        """Do nothing: messages arrive at once."""

    def watch_sends(self, note: NoteSent | None) -> None:
        """Call `note` for what is sent from now on, or stop that."""
        self._note_sent = note

    def remember_shapes(self) -> None:
        """Do nothing: packets carry their structure."""

    def forget_shapes(self) -> None:
        """Do nothing: packets carry their structure."""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    value = plain_value(tensor.detach())
    copy = value.clone() if value.layout is torch.strided else value.to_dense()
    return copy.requires_grad_(tensor.requires_grad)
