"""The shapes that messages had in earlier steps, by the signature of the step."""

from collections.abc import Mapping

from penstock.ranks.peer.ring import ALIGNMENT
from penstock.ranks.transport import Message
from penstock.tensors.wire_format import Format

__all__ = ["ShapeMemory", "answered_by", "bytes_in_flight"]

# How many signatures are remembered; after that, the oldest is forgotten.
_SIGNATURES = 64


class ShapeMemory:
    """What one rank knows of the messages that it sends and receives."""

    def __init__(self) -> None:
        self._formats: dict[bytes, Mapping[Message, Format]] = {}
        # The signatures under which a step with known shapes went well, labels and all.
        self._proven: set[bytes] = set()

    def find(self, signature: bytes) -> Mapping[Message, Format] | None:
        """Return the format of every message of such a step, if it was seen before."""
        return self._formats.get(signature)

    def is_proven(self, signature: bytes) -> bool:
        """Return whether a step with these shapes has used them and went well."""
        return signature in self._proven

    def prove(self, signature: bytes) -> None:
        """Note that a step with known shapes went well."""
        self._proven.add(signature)

    def learn(
        self, signature: bytes, activations: Mapping[Message, Format]
    ) -> Mapping[Message, Format]:
        """Remember the shapes of a step, and return those of its activations and gradients."""
        if len(self._formats) == _SIGNATURES:
            self.forget(next(iter(self._formats)))
        gradients = {answered_by(m): form.of_gradients for m, form in activations.items()}
        self._formats[signature] = {**activations, **gradients}
        return self._formats[signature]

    def forget(self, signature: bytes) -> None:
        """Learn the shapes of this signature again."""
        self._formats.pop(signature, None)
        self._proven.discard(signature)


def bytes_in_flight(
    known: Mapping[Message, Format], in_flight: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Return the bytes that channels carry at once, given how many messages they do.

    Where messages differ in size, one more: the end of a ring may be too short for the next one.
    """
    sizes: dict[tuple[int, int], set[int]] = {}
    for message, form in known.items():
        size = form.nbytes + ALIGNMENT * len(form.tensors)
        sizes.setdefault((message.source, message.destination), set()).add(size)
    return {
        pair: (in_flight.get(pair, 1) + (len(found) > 1)) * max(found)
        for pair, found in sizes.items()
    }


def answered_by(message: Message) -> Message:
    """Return the gradient that comes back for an activation, or the activation of a gradient."""
    is_forward, edge, microbatch, source, destination = message
    return Message(not is_forward, edge, microbatch, destination, source)
