"""Messages over `torch.distributed`: one rank of the schedule per process.

The first step with new shapes sends a header before each activation; after that both sides know
what comes, and receives are posted ahead. Gradients need no header: they have the form of what was
sent.

The order of the messages of a channel is that of the lowered schedule, the same on both sides.
Receives are started in the order in which they were posted, also while shapes are learned: what
was posted behind an activation is not started before the header of that activation has come.

Where messages have no tags, nothing else distinguishes them. So every message has a label there in
each step that learns shapes, in the first step after it with the same shapes, and in the first
after a failure. Labels are compared before a tensor is used:

    channel (tensors)    activation            gradient              activation
    beside it (labels)   0, F0 along edge 0    1, B0 along edge 1    2, F1 along edge 0

All of it uses the transport's own connections. Another thread can abort them; then every wait ends
with a `LinkLostError`, as it does when a connection breaks.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist

from penstock.errors import BoundaryError, PipelineError
from penstock.ranks.control import GroupControl
from penstock.ranks.faults import PeerFailedError
from penstock.ranks.labels import NO_PACKET, Label, MessageLabels, digest_of_form
from penstock.ranks.ordered_channels import make_channels
from penstock.ranks.private_groups import StartedWork
from penstock.ranks.sends_in_flight import SendsInFlight, wait_for
from penstock.ranks.shape_memory import ShapeMemory, answered_by, bytes_in_flight
from penstock.ranks.transport import Message, NoteSent
from penstock.tensors.packet import Packet
from penstock.tensors.plain import dense_value
from penstock.tensors.wire_format import Format, describe

__all__ = ["SENDS_AHEAD", "GroupTransport"]

# How many sends of a channel may be on their way before the next one waits for the oldest.
SENDS_AHEAD = 4


@dataclass(slots=True)
class _Incoming:
    """A receive that is under way; its `number` on its channel, where that is compared."""

    works: list[StartedWork]
    buffers: list[torch.Tensor]
    format: Format
    number: int


class GroupTransport:
    """One rank of the schedule, talking to the others through a process group.

    With `by_order` tensors meet by order alone on gloo too, as they do on NCCL; for tests. At most
    `sends_ahead` sends of a channel are in flight: the next one waits for the oldest. The
    `control` of the same ranks shares its connections with the transport, which opens one if none
    is given. Ranks of one machine use peer memory if they can and `uses_peer_memory` lets them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        by_order: bool = False,
        control: GroupControl | None = None,
        sends_ahead: float = SENDS_AHEAD,
        uses_peer_memory: bool = True,
    ) -> None:
        self._device = device
        self._sends_ahead = sends_ahead
        self.control = GroupControl(group) if control is None else control
        self._rank, self.num_ranks = self.control.rank, self.control.size
        self.ranks = (self._rank,)
        self.connections = self.control.connections
        self._gloo = self.control.gloo
        self._channels = make_channels(
            group, self.control, device, by_order=by_order, uses_peer_memory=uses_peer_memory
        )
        self._in_flight: Mapping[tuple[int, int], int] = {}
        self._has_tags = self._channels.has_tags
        self._labels = MessageLabels(self._gloo, has_tags=self._has_tags)
        self._shapes = ShapeMemory()
        self._is_after_failure = False
        self._reset(b"")

    def open_channels(self, in_flight: Mapping[tuple[int, int], int]) -> None:
        """Connect the ranks that will talk: one channel per direction, source first.

        All ranks give the same pairs in the same order, with the number of messages of each that
        are in flight at once.
        """
        self._in_flight = in_flight
        self._channels.open(self._rank, list(in_flight))

    @property
    def routes(self) -> Mapping[tuple[int, int], str]:
        """What carries the messages between this rank and others, source first."""
        return self._channels.routes

    @property
    def knows_shapes(self) -> bool:
        """Whether the shapes of the present step were known before it began."""
        return self._known is not None

    def abort(self) -> None:
        """End all communication and every wait for it; any thread may call this."""
        self.control.abort()
        self._channels.abort()

    def release(self, lost: int) -> None:
        """End waits of the device for a rank that is gone; any thread may call this."""
        self._channels.abort(lost)

    def wait_for_device(self) -> None:
        """Wait until the device has sent and received everything that is queued."""
        self._channels.wait_for_device()

    def close(self) -> None:
        """Free the channels of a device at once, which takes seconds when they are collected."""
        self._channels.close()

    def _reset(self, signature: bytes) -> None:
        self._signature = signature
        self._known = self._shapes.find(signature)
        is_proven = self._shapes.is_proven(signature) and not self._is_after_failure
        self._has_labels = not (self._has_tags or is_proven)
        self._learned: dict[Message, Format] = {}
        # Activations that one of the two ranks has given up.
        self._missing: set[Message] = set()
        # By source: posted but not started; started but not yet compared with their labels.
        self._posted: dict[int, deque[Message]] = {}
        self._unlabelled: dict[int, deque[Message]] = {}
        self._incoming: dict[Message, _Incoming] = {}
        self._sent: list[Message] = []
        self.has_unknown_hooks = False
        # A receiver that learns or compares does so late, and then no send may be waited for.
        is_steady = self._known is not None and not self._has_labels
        self._outgoing = SendsInFlight(self._sends_ahead if is_steady else inf)

    def begin_step(self, signature: bytes) -> None:
        """Look up the shapes of this signature, if it was seen before."""
        self._reset(signature)

    def send(self, message: Message, packet: Packet) -> None:
        """Send a packet; whatever can fail on this rank is done before anything leaves."""
        form = None
        if message.is_forward or self._has_labels:
            form = describe(packet.structure, packet.tensors, packet.hooked)
        if message.is_forward and self._known is not None and form != self._known[message]:
            raise BoundaryError(
                f"what edge {message.edge} carries has changed its form, though the batch has "
                f"not: {form} instead of {self._known[message]}"
            )
        if packet.hooked and self._known is not None:
            self.has_unknown_hooks |= not set(packet.hooked) <= set(self._known[message].hooked)
        buffers = [self._outbound(tensor) for tensor in packet.tensors]
        self._send_all(message, form, buffers)

    def send_failure(self, message: Message) -> None:
        """Keep the protocol going with zeros, or with a header that says why nothing comes."""
        if message in self._sent:
            return
        if message.is_forward and self._known is None:
            self._missing.add(message)
            self._sent.append(message)
            number = self._channels.number_to_send(message)
            self._outgoing.hold(
                message.destination, *self._labels.start(Label(number, message, 0, NO_PACKET), b"")
            )
            return
        form = self._find_form(message)
        if form is not None:
            zeros = [leaf.empty(self._channels.device).zero_() for leaf in form.tensors]
            self._send_all(message, form, zeros)

    def _send_all(
        self, message: Message, form: Format | None, buffers: list[torch.Tensor]
    ) -> None:
        """Send the label of a message, if it has one, and its tensors."""
        is_new = message.is_forward and self._known is None
        if form is not None and (is_new or self._has_labels):
            text = form.to_bytes() if is_new else b""
            number = self._channels.number_to_send(message)
            label = Label(number, message, digest_of_form(form), len(text))
            self._outgoing.hold(message.destination, *self._labels.start(label, text))
        if form is not None and is_new:
            self._learned[message] = form
        works = [self._channels.send(message, buffer) for buffer in buffers if buffer.numel()]
        self._outgoing.hold(message.destination, works, buffers)
        self._sent.append(message)

    def _find_form(self, message: Message) -> Format | None:
        """Return the form of a message, if it is known without a header of its own."""
        if self._known is not None:
            return self._known[message]
        if message.is_forward:
            return self._learned.get(message)
        form = self._learned.get(answered_by(message))
        return None if form is None else form.of_gradients

    def post_receive(self, message: Message) -> None:
        """Start the receive, unless its form or one posted before it is still to be learned."""
        if message in self._incoming:
            return
        if self._known is not None:
            self._start(message, self._known[message])
            return
        queue = self._posted.setdefault(message.source, deque())
        if message not in queue:
            queue.append(message)
            self._start_gradients(queue)

    def discard(self, message: Message) -> None:
        """Take a message that is no longer needed, if it is on its way."""
        # An older message of the channel may turn out to have failed, before this one is reached.
        while message in self._incoming or message in self._posted.get(message.source, ()):
            with suppress(PeerFailedError):
                self._start_until(message)
                if message in self._incoming:
                    self.receive(message)

    def receive(self, message: Message) -> Packet:
        """Wait for a message; those posted before it on its channel are started first."""
        if message not in self._incoming:
            self._start_until(message)
            if message not in self._incoming:
                raise PipelineError(f"{message} was not posted")
        if self._has_labels:
            self._compare_labels(message)
        incoming = self._incoming.pop(message)
        wait_for(incoming.works)
        tensors = [self._inbound(buffer) for buffer in incoming.buffers]
        if not message.is_forward:
            return Packet("", tensors)
        for tensor, form in zip(tensors, incoming.format.tensors, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return Packet(incoming.format.tree_structure, tensors, incoming.format.hooked)

    def release_sends(self) -> None:
        """Do nothing: messages leave when they are sent."""

    def end_step(self) -> None:
        """Wait for all sends, on a device by letting the current stream wait."""
        self._outgoing.wait_for_all()
        self._channels.end_step()

    def watch_sends(self, note: NoteSent | None) -> None:
        """Call `note` for what is sent from now on, if a device carries it; or stop that."""
        self._channels.watch_sends(note)

    def remember_shapes(self) -> None:
        """Send no headers with this signature any more; called by all ranks or by none."""
        self._channels.complete_step()
        self._is_after_failure = False
        if self._known is not None:
            self._shapes.prove(self._signature)
            return
        known = self._shapes.learn(self._signature, self._learned)
        self._channels.make_room(bytes_in_flight(known, self._in_flight))

    def forget_shapes(self) -> None:
        """Learn the shapes of this signature again; called by all ranks or by none."""
        self._is_after_failure = True
        self._shapes.forget(self._signature)

    def _start_until(self, message: Message) -> None:
        """Start what was posted on a channel, in that order, until this message is started."""
        queue = self._posted.get(message.source, deque())
        while message not in self._incoming and message in queue:
            self._start_gradients(queue)
            if message not in self._incoming and message in queue:
                self._start_next(queue)

    def _start_gradients(self, queue: deque[Message]) -> None:
        """Start what comes first in a queue as far as no header has to be waited for."""
        while queue and not queue[0].is_forward:
            form = self._find_form(queue[0])
            # What never went there has no gradient, and neither end has a message for it.
            if form is None and answered_by(queue[0]) not in self._missing:
                return
            if form is not None:
                self._start(queue[0], form)
            queue.popleft()

    def _start_next(self, queue: deque[Message]) -> None:
        """Wait for the header of the activation that comes first in a queue, and start it."""
        message = queue[0]
        if not message.is_forward:
            raise PipelineError(f"{message} is waited for before its activation was sent")
        if message not in self._learned:
            form = self._receive_header(message)
            if form is None:
                self._missing.add(queue.popleft())
                raise PeerFailedError(f"rank {message.source} failed before it could send")
            self._learned[message] = form
        # If there is no memory, the message stays in the queue, to be taken off the wire.
        self._start(message, self._learned[message])
        queue.popleft()

    def _start(self, message: Message, form: Format) -> None:
        buffers = [leaf.empty(self._channels.device) for leaf in form.tensors]
        number = self._channels.number_to_receive(message) if self._has_labels else 0
        works = [self._channels.receive(message, buffer) for buffer in buffers if buffer.numel()]
        self._incoming[message] = _Incoming(works, buffers, form, number)
        if self._has_labels and not (message.is_forward and self._known is None):
            self._unlabelled.setdefault(message.source, deque()).append(message)

    def _receive_header(self, message: Message) -> Format | None:
        """Wait for the form of an activation; None if there will be none."""
        started = self._unlabelled.get(message.source)
        if started:
            # Labels meet by order too, so those of what was started before come first.
            self._compare_labels(started[-1])
        label = self._labels.receive(message)
        if not self._has_tags:
            number = self._channels.number_to_receive(message)
            label.require(Label(number, message, label.digest))
        return None if label.form_bytes == NO_PACKET else self._labels.receive_form(label)

    def _compare_labels(self, message: Message) -> None:
        """Compare what was started on a channel with its labels, up to this message."""
        queue = self._unlabelled.get(message.source, deque())
        while message in queue:
            started = queue.popleft()
            incoming = self._incoming[started]
            expected = Label(incoming.number, started, digest_of_form(incoming.format))
            self._labels.receive(started).require(expected)

    def _outbound(self, tensor: torch.Tensor) -> torch.Tensor:
        value = dense_value(tensor)
        if value.device == self._channels.device:
            return value
        if self._channels.device.type != "cpu":
            return value.to(self._channels.device)
        staged = torch.empty_like(value, device="cpu", pin_memory=True)
        return staged.copy_(value)

    def _inbound(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if buffer.device == self._device else buffer.to(self._device)
