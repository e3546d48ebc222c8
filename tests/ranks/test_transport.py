"""The transport with all ranks in one process."""

import pytest
import torch

from penstock.ranks.transport import LocalTransport, Message
from penstock.tensors.packet import Packet

MESSAGE = Message(is_forward=True, edge=0, microbatch=3, source=0, destination=1)


def start() -> LocalTransport:
    transport = LocalTransport(2)
    transport.begin_step(b"")
    return transport


def test_message_arrives_unchanged_in_its_own_memory() -> None:
    transport = start()
    sent = torch.arange(3.0, requires_grad=True)
    mask = torch.tensor([True, False])
    transport.send(MESSAGE, Packet(["t", ["T", "T"]], [sent, mask]))
    transport.post_receive(MESSAGE)
    packet = transport.receive(MESSAGE)
    assert packet.structure == ["t", ["T", "T"]]
    assert [tensor.tolist() for tensor in packet.tensors] == [[0.0, 1.0, 2.0], [True, False]]
    assert [tensor.requires_grad for tensor in packet.tensors] == [True, False]
    assert all(tensor.is_leaf for tensor in packet.tensors)
    packet.tensors[0].data.zero_()
    assert sent.tolist() == [0.0, 1.0, 2.0]


def test_message_can_be_received_once() -> None:
    transport = start()
    transport.send(MESSAGE, Packet("T", [torch.ones(1)]))
    transport.receive(MESSAGE)
    with pytest.raises(KeyError):
        transport.receive(MESSAGE)


def test_new_step_starts_without_the_messages_of_the_last() -> None:
    transport = start()
    transport.send(MESSAGE, Packet("T", [torch.ones(1)]))
    transport.begin_step(b"")
    with pytest.raises(KeyError):
        transport.receive(MESSAGE)


def test_discarding_removes_a_message_and_accepts_one_that_never_came() -> None:
    transport = start()
    transport.send(MESSAGE, Packet("T", [torch.ones(1)]))
    transport.discard(MESSAGE)
    transport.discard(MESSAGE)
    with pytest.raises(KeyError):
        transport.receive(MESSAGE)


def test_one_process_runs_all_ranks() -> None:
    transport = LocalTransport(3)
    assert transport.ranks == (0, 1, 2)
    assert transport.num_ranks == 3
