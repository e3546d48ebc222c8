"""Labels that are sent ahead of messages: number on the channel, name and form.

Where messages are matched by order alone, the receiver compares the label with what it has started
to receive under that number. So two messages in the wrong order are found before they are used.
"""

from dataclasses import dataclass, replace
from hashlib import sha256

import torch
import torch.distributed as dist

from penstock.errors import BoundaryError
from penstock.ranks.channels import header_tag
from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import PrivateGroup
from penstock.ranks.transport import Message
from penstock.tensors.wire_format import Format

__all__ = ["NO_PACKET", "Label", "MessageLabels", "digest_of_form"]

# The length of the form in a label that announces that there will be no packet.
NO_PACKET = -1

# How many numbers make up a label.
_FIELDS = 6
# The tag of all labels between two ranks where they are matched by order.
_ANY_LABEL = 2
_DIGEST_BYTES = 7


@dataclass(frozen=True, slots=True)
class Label:
    """One message by its number on its channel and by name, with a digest of its form.

    `form_bytes` is the length of the form itself, which follows if the receiver has to learn it.
    """

    number: int
    message: Message
    digest: int
    form_bytes: int = 0

    def to_tensor(self) -> torch.Tensor:
        """Return the label as numbers for the other end of the channel."""
        message = self.message
        name = (int(message.is_forward), message.edge, message.microbatch)
        return torch.tensor([self.number, *name, self.digest, self.form_bytes])

    @classmethod
    def from_tensor(cls, numbers: torch.Tensor, source: int, destination: int) -> "Label":
        """Read a label that came from `source`."""
        number, is_forward, edge, microbatch, digest, form_bytes = numbers.tolist()
        message = Message(bool(is_forward), edge, microbatch, source, destination)
        return cls(number, message, digest, form_bytes)

    def require(self, expected: "Label") -> None:
        """Refuse a label that does not match what its receiver has prepared for."""
        if (self.number, self.message, self.digest) != (
            expected.number,
            expected.message,
            expected.digest,
        ):
            ends = f"rank {expected.message.source} to rank {expected.message.destination}"
            raise LinkLostError(
                f"the next message from {ends} must be {expected} (got {self}); the two ranks "
                "have different orders of messages, which is a defect of penstock: report it"
            )

    def __str__(self) -> str:
        kind = "activation" if self.message.is_forward else "gradient"
        return (
            f"number {self.number}, the {kind} of microbatch {self.message.microbatch} on edge "
            f"{self.message.edge} with form {self.digest:x}"
        )


class MessageLabels:
    """Sends and receives labels in host memory, beside the channels that their tensors take."""

    def __init__(self, gloo: PrivateGroup, *, has_tags: bool) -> None:
        self._gloo = gloo
        self._has_tags = has_tags

    def start(self, label: Label, form: bytes) -> tuple[list[dist.Work], list[torch.Tensor]]:
        """Start to send a label, and the form that follows it if there is one.

        What is returned must be kept until the sends are done.
        """
        parts = [label.to_tensor()]
        if form:
            parts.append(torch.frombuffer(bytearray(form), dtype=torch.uint8))
        tag, peer = self._tag(label.message), label.message.destination
        try:
            return [self._gloo.send([part], peer, tag) for part in parts], parts
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def receive(self, message: Message) -> Label:
        """Wait for the label of a message, or for the next on its channel if there are no tags.

        It may differ from what is expected; see `Label.require`.
        """
        numbers = torch.empty(_FIELDS, dtype=torch.int64)
        self._fill(message, numbers)
        return Label.from_tensor(numbers, message.source, message.destination)

    def receive_form(self, label: Label) -> Format:
        """Wait for the form that follows a label."""
        text = torch.empty(label.form_bytes, dtype=torch.uint8)
        self._fill(label.message, text)
        try:
            form = Format.from_bytes(bytes(text.tolist()))
        except BoundaryError as error:
            # Its tensors are on their way, and could not be received.
            raise LinkLostError(str(error)) from error
        label.require(replace(label, digest=digest_of_form(form)))
        return form

    def _fill(self, message: Message, buffer: torch.Tensor) -> None:
        try:
            self._gloo.recv([buffer], message.source, self._tag(message)).wait()
        except RuntimeError as error:
            raise LinkLostError(str(error)) from error

    def _tag(self, message: Message) -> int:
        return header_tag(message) if self._has_tags else _ANY_LABEL


def digest_of_form(form: Format) -> int:
    """Return a number that depends on the structure, shapes and dtypes of a message."""
    leaves = [(leaf.shape, str(leaf.dtype)) for leaf in form.tensors]
    text = repr((form.structure, leaves))
    return int.from_bytes(sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
