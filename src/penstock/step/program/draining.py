"""What a rank still does in a step that has failed on it: its communication, without the work."""

from collections.abc import Iterable, MutableMapping, Sequence

from penstock.ir.actions import Action, Kind
from penstock.ranks.faults import LinkLostError
from penstock.ranks.transport import Message, Transport
from penstock.step.program.messages import StepMessages
from penstock.tensors.packet import Packet

__all__ = ["drain"]


def drain(
    left: Iterable[tuple[Action, Sequence[Message]]],
    transport: Transport,
    messages: StepMessages,
    held: MutableMapping[Message, Packet],
) -> None:
    """Do the communication of the actions that are left, so that other ranks can finish.

    Each action comes with the messages from other ranks that it uses up; `held` are those made.
    """
    try:
        for action, takes in left:
            for message in takes:
                transport.discard(message)
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                transport.post_receive(messages.of(action))
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                _send_if_made(messages.of(action), transport, held)
    except LinkLostError:
        raise
    except Exception as error:
        # Others may wait for messages that will never be complete.
        raise LinkLostError(
            f"the communication of a failed step could not be completed: {error}"
        ) from error


def _send_if_made(
    message: Message, transport: Transport, held: MutableMapping[Message, Packet]
) -> None:
    if message not in held:
        transport.send_failure(message)
        return
    try:
        transport.send(message, held.pop(message))
    except LinkLostError:
        raise
    except Exception:
        # The step has failed already; the first error is the one to raise.
        transport.send_failure(message)
