"""Messages over `torch.distributed`: one rank of the schedule per process.

The first step with new shapes sends a header before each activation; after that both sides know
what comes, and receives are posted ahead. Gradients need no header: they have the form of what was
sent. Every direction of every pair of ranks is a channel of its own: with gloo by tags, otherwise
by a group of two, so that a receive that waits never holds up the other direction.

All of it goes over connections that are the transport's own. Another thread can hang them up; then
every wait ends with a `LinkLostError`, as it does when a connection breaks.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from penstock.errors import BoundaryError, PipelineError
from penstock.runtime.faults import LinkLostError, PeerFailedError
from penstock.runtime.hang_up import Connections
from penstock.runtime.metadata import Format, TensorFormat, describe
from penstock.runtime.own_groups import OwnGroup, open_gloo, open_nccl
from penstock.runtime.stage import Packet
from penstock.runtime.transport import Message

__all__ = ["GroupTransport"]

# What keeps a send going: its works, and the tensors that must live until they are done.
_Outgoing: TypeAlias = tuple[list[dist.Work], list[torch.Tensor]]

# How many sends of a channel may be on their way before the next one waits for the oldest.
_SENDS_AHEAD = 4
# How many signatures are remembered; where shapes never come back, the oldest go.
_SIGNATURES = 64
# The length of a header that says: there will be no packet.
_FAILED = -1
# Who is who in the group of a channel, which has two members.
_SENDER, _RECEIVER = 0, 1


@dataclass(slots=True)
class _Incoming:
    """A receive that is under way."""

    works: list[dist.Work]
    buffers: list[torch.Tensor]
    format: Format


class GroupTransport:
    """One rank of the schedule, talking to the others through a process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.ranks = (self._rank,)
        self.connections = Connections()
        self._gloo = open_gloo(group, self.connections)
        self._has_tags = dist.get_backend(group) == "gloo"
        # Gloo speaks from host memory; what is on a device goes through a pinned copy.
        self._wire_device = torch.device("cpu") if self._has_tags else device
        self._channels: dict[tuple[int, int], OwnGroup] = {}
        self._formats: dict[bytes, dict[Message, Format]] = {}
        self._reset(b"")

    def open_channels(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make a group of two per direction of each pair that will talk, where tags do not do.

        All ranks give the same pairs in the same order.
        """
        for source, destination in [] if self._has_tags else pairs:
            if self._rank in (source, destination):
                both = (source, destination)
                self._channels[both] = open_nccl(self._group, both)

    def hang_up(self) -> None:
        """End all communication, whoever waits for it; any thread may call this."""
        self.connections.hang_up()
        for channel in self._channels.values():
            channel.abort()

    def _reset(self, signature: bytes) -> None:
        self._signature = signature
        self._known = self._formats.get(signature)
        self._learned: dict[Message, Format] = {}
        self._posted: list[Message] = []
        self._incoming: dict[Message, _Incoming] = {}
        self._outgoing: dict[int, deque[_Outgoing]] = {}

    def begin_step(self, signature: bytes) -> None:
        """Look up the shapes that this signature stands for, if it was seen before."""
        self._reset(signature)

    def send(self, message: Message, packet: Packet) -> None:
        """Send a packet, with a header if its form is new to the receiver."""
        if message.is_forward:
            form = describe(packet.structure, packet.tensors)
            if self._known is None:
                self._send_header(message, form.to_bytes())
                self._learned[message] = form
            elif form != self._known[message]:
                raise BoundaryError(
                    f"what edge {message.edge} carries has changed its form, though the batch has "
                    f"not: {form} instead of {self._known[message]}"
                )
        self._send_tensors(message, [self._outbound(tensor) for tensor in packet.tensors])

    def send_failure(self, message: Message) -> None:
        """Keep the protocol going with zeros, or with a header that tells."""
        if message.is_forward and self._known is None:
            self._send_header(message, None)
            return
        formats = self._formats_of(message) or ()
        self._send_tensors(message, [form.empty(self._wire_device).zero_() for form in formats])

    def _formats_of(self, message: Message) -> Sequence[TensorFormat] | None:
        """The tensors of a message, if its activation went, or will go, between the two ranks."""
        if message.is_forward:
            return None if self._known is None else self._known[message].tensors
        activation = message._replace(
            is_forward=True, source=message.destination, destination=message.source
        )
        known = self._learned if self._known is None else self._known
        return known[activation].gradient_formats if activation in known else None

    def _send_tensors(self, message: Message, buffers: list[torch.Tensor]) -> None:
        self._hold(message, [self._isend(message, buffer) for buffer in buffers], buffers)

    def post_receive(self, message: Message) -> None:
        """Post the receive now if its form is known, else when somebody waits for it."""
        if message.is_forward and self._known is not None:
            self._start(message, self._known[message])
        elif message.is_forward:
            self._posted.append(message)
        elif (formats := self._formats_of(message)) is not None:
            self._start(message, Format("", tuple(formats)))

    def discard(self, message: Message) -> None:
        """Take a message that nobody wants any more, if it is on its way."""
        # An older message of the channel may turn out to have failed, before this one is reached.
        while message in self._incoming or message in self._posted:
            with suppress(PeerFailedError):
                self.receive(message)

    def receive(self, message: Message) -> Packet:
        """Wait for a message; those posted before it on its channel are started first."""
        if message not in self._incoming:
            self._start_until(message)
        incoming = self._incoming.pop(message)
        _wait(incoming.works)
        tensors = [self._inbound(buffer) for buffer in incoming.buffers]
        if not message.is_forward:
            return Packet("", tensors)
        for tensor, form in zip(tensors, incoming.format.tensors, strict=True):
            tensor.requires_grad_(form.requires_grad)
        return Packet(incoming.format.tree_structure, tensors)

    def gather(self, data: bytes) -> list[bytes]:
        """One small collective on the host, if there is anybody else."""
        if self.num_ranks == 1:
            return [data]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        try:
            self._gloo.allgather([theirs], [mine]).wait()
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error
        return [bytes(item.tolist()) for item in theirs]

    def end_step(self) -> None:
        """Wait for all sends."""
        for channel in self._outgoing.values():
            while channel:
                _wait(channel.popleft()[0])

    def remember_shapes(self) -> None:
        """From now on this signature needs no headers; called by all ranks or by none."""
        if self._known is None:
            if len(self._formats) == _SIGNATURES:
                del self._formats[next(iter(self._formats))]
            self._formats[self._signature] = self._learned

    def forget_shapes(self) -> None:
        """Learn anew what this signature stands for; called by all ranks or by none."""
        self._formats.pop(self._signature, None)

    def _start_until(self, message: Message) -> None:
        channel = message.source
        for waiting in [m for m in self._posted if m.source == channel]:
            self._posted.remove(waiting)
            self._learned[waiting] = self._receive_header(waiting)
            self._start(waiting, self._learned[waiting])
            if waiting == message:
                return
        raise PipelineError(f"{message} was not posted")

    def _start(self, message: Message, form: Format) -> None:
        buffers = [leaf.empty(self._wire_device) for leaf in form.tensors]
        works = [self._irecv(message, buffer) for buffer in buffers]
        self._incoming[message] = _Incoming(works, buffers, form)

    def _hold(self, message: Message, works: list[dist.Work], buffers: list[torch.Tensor]) -> None:
        """Keep what is being sent alive, and let go of what has left."""
        channel = self._outgoing.setdefault(message.destination, deque())
        channel.append((works, buffers))
        # While shapes are being learned a receiver posts late, so no send may be waited for.
        while self._known is not None and len(channel) > _SENDS_AHEAD:
            _wait(channel.popleft()[0])

    def _isend(self, message: Message, buffer: torch.Tensor) -> dist.Work:
        try:
            if self._has_tags:
                return self._gloo.send([buffer], message.destination, _data_tag(message))
            channel = self._channels[message.source, message.destination]
            return channel.send([buffer], _RECEIVER, 0)
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def _irecv(self, message: Message, buffer: torch.Tensor) -> dist.Work:
        try:
            if self._has_tags:
                return self._gloo.recv([buffer], message.source, _data_tag(message))
            channel = self._channels[message.source, message.destination]
            return channel.recv([buffer], _SENDER, 0)
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def _send_header(self, message: Message, header: bytes | None) -> None:
        parts = [torch.tensor([_FAILED if header is None else len(header)])]
        if header is not None:
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        tag, peer = _header_tag(message), message.destination
        try:
            works = [self._gloo.send([part], peer, tag) for part in parts]
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error
        self._hold(message, works, parts)

    def _receive_header(self, message: Message) -> Format:
        length = torch.empty(1, dtype=torch.int64)
        self._receive_part(message, length)
        if length.item() == _FAILED:
            raise PeerFailedError(f"rank {message.source} failed before it could send")
        header = torch.empty(int(length.item()), dtype=torch.uint8)
        self._receive_part(message, header)
        return Format.from_bytes(bytes(header.tolist()))

    def _receive_part(self, message: Message, buffer: torch.Tensor) -> None:
        try:
            self._gloo.recv([buffer], message.source, _header_tag(message)).wait()
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def _outbound(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous()
        if not self._has_tags or tensor.device.type == "cpu":
            return tensor
        staged = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return staged.copy_(tensor)

    def _inbound(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if buffer.device == self._device else buffer.to(self._device)


def _wait(works: list[dist.Work]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise LinkLostError(str(error)) from error


def _data_tag(message: Message) -> int:
    return 4 * (message.edge * 65536 + message.microbatch) + message.is_forward


def _header_tag(message: Message) -> int:
    return _data_tag(message) + 2
