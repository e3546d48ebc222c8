"""Messages between processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import BoundaryError
from penstock.runtime.faults import PeerFailedError
from penstock.runtime.group_transport import GroupTransport
from penstock.runtime.stage import Packet
from penstock.runtime.transport import Message
from penstock.runtime.tree import flatten, unflatten
from tests.processes import Processes


def open_transport() -> GroupTransport:
    group = dist.group.WORLD
    assert group is not None
    return GroupTransport(group, torch.device("cpu"))


def activation(microbatch: int, edge: int = 0) -> Message:
    return Message(is_forward=True, edge=edge, microbatch=microbatch, source=0, destination=1)


def gradient(microbatch: int, edge: int = 0) -> Message:
    return Message(is_forward=False, edge=edge, microbatch=microbatch, source=1, destination=0)


def pack(tree: object) -> Packet:
    return Packet(*flatten(tree))


def end(transport: GroupTransport) -> None:
    """Like the end of a good step."""
    transport.end_step()
    transport.gather(b"well")
    transport.remember_shapes()


TREE = {
    "float": torch.arange(6.0).reshape(2, 3),
    "half": torch.arange(3.0).bfloat16(),
    "bool": torch.tensor([True, False]),
    "long": torch.tensor(7),
    "complex": torch.tensor([1 + 2j]),
    "empty": torch.empty(0, 3),
    "view": torch.arange(6.0).reshape(2, 3).T,
    "none": None,
    "rest": (3, "text", [0.5, False]),
}


def exchange_tree(rank: int) -> list[Any]:
    """What rank 1 gets in two steps of which only the first has headers."""
    transport = open_transport()
    received = []
    for _ in range(2):
        transport.begin_step(b"tree")
        if rank == 0:
            transport.send(activation(0), pack(TREE))
        else:
            transport.post_receive(activation(0))
            packet = transport.receive(activation(0))
            received.append(unflatten(packet.structure, packet.tensors))
        end(transport)
    return received


def test_tree_of_anything_arrives_as_it_was_sent(two_processes: Processes) -> None:
    first, second = two_processes.run(exchange_tree)[1]
    for received in (first, second):
        assert list(received) == list(TREE)
        for name, value in TREE.items():
            if isinstance(value, torch.Tensor):
                assert received[name].dtype == value.dtype
                assert torch.equal(received[name], value)
            else:
                assert received[name] == value


def exchange_gradients(rank: int) -> list[Any]:
    """Only what requires a gradient gets one, and no header goes before it."""
    transport = open_transport()
    results: list[Any] = []
    for number in range(2):
        transport.begin_step(b"gradients")
        if rank == 0:
            sent = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(3)}
            transport.send(activation(0), pack(sent))
            transport.post_receive(gradient(0))
            results.append([tensor.tolist() for tensor in transport.receive(gradient(0)).tensors])
        else:
            transport.post_receive(activation(0))
            tensors = transport.receive(activation(0)).tensors
            results.append([tensor.requires_grad for tensor in tensors])
            transport.send(gradient(0), Packet("", [torch.full((2,), 5.0 + number)]))
        end(transport)
    return results


def test_gradients_come_back_for_what_requires_one(two_processes: Processes) -> None:
    assert two_processes.run(exchange_gradients) == [
        [[[5.0, 5.0]], [[6.0, 6.0]]],
        [[True, False], [True, False]],
    ]


def receive_in_another_order(rank: int) -> list[float]:
    """Messages of two edges and three microbatches, taken in another order than they were sent."""
    transport = open_transport()
    order = [(microbatch, edge) for microbatch in range(3) for edge in range(2)]
    received: list[float] = []
    for _ in range(2):
        transport.begin_step(b"order")
        received.clear()
        if rank == 0:
            for microbatch, edge in order:
                value = torch.tensor([10.0 * edge + microbatch])
                transport.send(activation(microbatch, edge), pack(value))
        else:
            for microbatch, edge in order:
                transport.post_receive(activation(microbatch, edge))
            for microbatch, edge in sorted(order, key=lambda pair: (pair[1], -pair[0])):
                packet = transport.receive(activation(microbatch, edge))
                received.append(packet.tensors[0].item())
        end(transport)
    return received


def test_messages_may_be_taken_in_any_order(two_processes: Processes) -> None:
    assert two_processes.run(receive_in_another_order)[1] == [2.0, 1.0, 0.0, 12.0, 11.0, 10.0]


def fail_to_send(rank: int) -> list[str]:
    """A failure before any shape is known is told; later there are zeros in its place."""
    transport = open_transport()
    ends = []
    for number in range(4):
        transport.begin_step(b"failure")
        if rank == 0 and number in (0, 2):
            transport.send_failure(activation(0))
        elif rank == 0:
            transport.send(activation(0), pack(torch.ones(2)))
        else:
            transport.post_receive(activation(0))
            try:
                ends.append(str(transport.receive(activation(0)).tensors[0].tolist()))
            except PeerFailedError as error:
                ends.append(str(error))
        transport.end_step()
        transport.gather(b"done")
        if number in (0, 3):
            transport.forget_shapes()
        else:
            transport.remember_shapes()
    return ends


def test_failure_takes_the_place_of_a_message(two_processes: Processes) -> None:
    assert two_processes.run(fail_to_send)[1] == [
        "rank 0 failed before it could send",
        "[1.0, 1.0]",
        "[0.0, 0.0]",
        "[1.0, 1.0]",
    ]


def discard_messages(rank: int) -> str:
    """Discarding takes what was posted, told or not, and leaves the next message alone."""
    transport = open_transport()
    transport.begin_step(b"discard")
    if rank == 0:
        transport.send(activation(0), pack(torch.ones(2)))
        transport.send_failure(activation(1))
        transport.send(activation(2), pack(torch.full((2,), 2.0)))
        end(transport)
        return ""
    for microbatch in range(3):
        transport.post_receive(activation(microbatch))
    for microbatch in (0, 1, 7):
        transport.discard(activation(microbatch))
    value = str(transport.receive(activation(2)).tensors[0].tolist())
    end(transport)
    return value


def test_messages_that_nobody_wants_are_taken_off_the_wire(two_processes: Processes) -> None:
    assert two_processes.run(discard_messages) == ["", "[2.0, 2.0]"]


def change_form(rank: int) -> str:
    transport = open_transport()
    transport.begin_step(b"form")
    if rank == 0:
        transport.send(activation(0), pack(torch.ones(2)))
    else:
        transport.post_receive(activation(0))
        transport.receive(activation(0))
    end(transport)
    transport.begin_step(b"form")
    if rank == 1:
        return ""
    with pytest.raises(BoundaryError) as caught:
        transport.send(activation(0), pack(torch.ones(3)))
    return str(caught.value).partition(":")[0]


def test_form_that_changes_under_a_known_signature_is_refused(two_processes: Processes) -> None:
    assert two_processes.run(change_form)[0] == (
        "what edge 0 carries has changed its form, though the batch has not"
    )


def remember_many(rank: int) -> list[int]:
    """Steps with more forms than are remembered, then one of the first and one of the last."""
    transport = open_transport()
    sizes = [*range(1, 101), 1, 100]
    received = []
    for size in sizes:
        transport.begin_step(str(size).encode())
        if rank == 0:
            transport.send(activation(0), pack(torch.ones(size)))
        else:
            transport.post_receive(activation(0))
            received.append(len(transport.receive(activation(0)).tensors[0]))
        end(transport)
    return received


def test_forms_that_were_forgotten_are_learned_again(two_processes: Processes) -> None:
    assert two_processes.run(remember_many)[1] == [*range(1, 101), 1, 100]
