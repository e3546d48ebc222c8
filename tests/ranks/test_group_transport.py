"""Messages between processes, found by their tags and by their order."""

import re
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import BoundaryError
from penstock.ranks.faults import LinkLostError, PeerFailedError
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Message
from penstock.tensors.packet import Packet
from penstock.tensors.tree import flatten, unflatten
from tests.processes import Processes


def open_transport(by_order: bool) -> GroupTransport:
    group = dist.group.WORLD
    assert group is not None
    transport = GroupTransport(group, torch.device("cpu"), by_order=by_order)
    transport.open_channels({(0, 1): 2, (1, 0): 2})
    return transport


both_ways = pytest.mark.parametrize("by_order", [False, True])


def activation(microbatch: int, edge: int = 0) -> Message:
    return Message(is_forward=True, edge=edge, microbatch=microbatch, source=0, destination=1)


def gradient(microbatch: int, edge: int = 0) -> Message:
    return Message(is_forward=False, edge=edge, microbatch=microbatch, source=1, destination=0)


def pack(tree: object) -> Packet:
    return Packet(*flatten(tree))


def end(transport: GroupTransport) -> None:
    """Like the end of a good step."""
    transport.end_step()
    transport.control.gather_bytes(b"well")
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


def exchange_tree(rank: int, by_order: bool) -> list[Any]:
    """Return what rank 1 gets in two steps of which only the first has headers."""
    transport = open_transport(by_order)
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


@both_ways
def test_any_tree_of_tensors_arrives_unchanged(by_order: bool, two_processes: Processes) -> None:
    first, second = two_processes.run(exchange_tree, by_order)[1]
    for received in (first, second):
        assert list(received) == list(TREE)
        for name, value in TREE.items():
            if isinstance(value, torch.Tensor):
                assert received[name].dtype == value.dtype
                assert torch.equal(received[name], value)
            else:
                assert received[name] == value


def exchange_gradients(rank: int, by_order: bool) -> list[Any]:
    """Only what requires a gradient gets one, and no header goes before it."""
    transport = open_transport(by_order)
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


@both_ways
def test_gradients_come_back_for_tensors_that_require_them(
    by_order: bool, two_processes: Processes
) -> None:
    assert two_processes.run(exchange_gradients, by_order) == [
        [[[5.0, 5.0]], [[6.0, 6.0]]],
        [[True, False], [True, False]],
    ]


def receive_in_another_order(rank: int, by_order: bool) -> list[float]:
    """Messages of two edges and three microbatches, taken in another order than they were sent."""
    transport = open_transport(by_order)
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


@both_ways
def test_messages_may_be_received_in_any_order(by_order: bool, two_processes: Processes) -> None:
    assert two_processes.run(receive_in_another_order, by_order)[1] == [
        2.0,
        1.0,
        0.0,
        12.0,
        11.0,
        10.0,
    ]


def fail_to_send(rank: int, by_order: bool) -> list[str]:
    """Fail before any shape is known, which a header reports, and later, which sends zeros."""
    transport = open_transport(by_order)
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
        transport.control.gather_bytes(b"done")
        if number in (0, 3):
            transport.forget_shapes()
        else:
            transport.remember_shapes()
    return ends


@both_ways
def test_failure_takes_the_place_of_a_message(by_order: bool, two_processes: Processes) -> None:
    assert two_processes.run(fail_to_send, by_order)[1] == [
        "rank 0 failed before it could send",
        "[1.0, 1.0]",
        "[0.0, 0.0]",
        "[1.0, 1.0]",
    ]


def discard_messages(rank: int, by_order: bool) -> str:
    """Discard what was posted, started or not, and receive the next message."""
    transport = open_transport(by_order)
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


@both_ways
def test_messages_that_are_no_longer_needed_are_received_and_dropped(
    by_order: bool, two_processes: Processes
) -> None:
    assert two_processes.run(discard_messages, by_order) == ["", "[2.0, 2.0]"]


def change_form(rank: int, by_order: bool) -> str:
    transport = open_transport(by_order)
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


@both_ways
def test_form_that_changes_under_a_known_signature_is_refused(
    by_order: bool, two_processes: Processes
) -> None:
    assert two_processes.run(change_form, by_order)[0] == (
        "what edge 0 carries has changed its form, though the batch has not"
    )


def remember_many(rank: int, by_order: bool) -> list[int]:
    """Steps with more forms than are remembered, then one of the first and one of the last."""
    transport = open_transport(by_order)
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


@both_ways
def test_forgotten_forms_are_learned_again(by_order: bool, two_processes: Processes) -> None:
    assert two_processes.run(remember_many, by_order)[1] == [*range(1, 101), 1, 100]


# ---- what goes in one order on both sides


def mix_both_kinds(rank: int, by_order: bool) -> list[list[float]]:
    """Activations and gradients on one channel, all posted before one is waited for."""
    transport = open_transport(by_order)
    there, back = activation(0), activation(1)._replace(edge=1, source=1, destination=0)
    answer = back._replace(is_forward=False, source=0, destination=1)
    received = []
    for _ in range(3):
        transport.begin_step(b"mixed")
        value = torch.full((2,), 1.0 + rank, requires_grad=True)
        if rank == 1:
            transport.send(back, pack(value))
            transport.post_receive(there)
            transport.post_receive(answer)
            received += [transport.receive(m).tensors[0].tolist() for m in (answer, there)]
        else:
            transport.post_receive(back)
            transport.receive(back)
            transport.send(there, pack(value))
            transport.send(answer, Packet("", [torch.full((2,), 5.0)]))
        end(transport)
    return received


@both_ways
def test_gradient_behind_an_activation_is_not_mistaken_for_it(
    by_order: bool, two_processes: Processes
) -> None:
    # A gradient's receive was started at once, an activation's when somebody waited for it: by
    # order alone each got what was meant for the other.
    assert two_processes.run(mix_both_kinds, by_order)[1] == [[5.0, 5.0], [1.0, 1.0]] * 3


def swap_in_step(rank: int, swapped: int) -> str:
    """Return the error of rank 1 when it expects two messages in another order than sent."""
    transport = open_transport(by_order=True)
    sent = [activation(0), activation(1)]
    for number in range(swapped + 1):
        transport.begin_step(b"swap")
        if rank == 0:
            # Rank 1 may have found the first message wrong before the second is sent.
            with suppress(LinkLostError) if number == swapped else nullcontext():
                for message in sent:
                    transport.send(message, pack(torch.ones(2)))
            if number == swapped:
                return ""
        else:
            posted = sent[::-1] if number == swapped else sent
            for message in posted:
                transport.post_receive(message)
            try:
                for message in sent:
                    transport.receive(message)
            except LinkLostError as error:
                return str(error)
        end(transport)
    return "nothing was found"


@pytest.mark.parametrize("swapped", [0, 1])
def test_messages_in_the_wrong_order_are_named(swapped: int, two_processes: Processes) -> None:
    number = 2 * swapped
    assert re.fullmatch(
        f"the next message from rank 0 to rank 1 must be number {number}, the activation of "
        rf"microbatch 1 on edge 0 with form \w+ \(got number {number}, the activation of "
        r"microbatch 0 on edge 0 with form \w+\); the two ranks have different orders of "
        "messages, which is a defect of penstock: report it",
        two_processes.run(swap_in_step, swapped)[1],
    )


def send_another_form(rank: int) -> str:
    """Rank 0 counts on a gradient of two numbers, and is sent one."""
    transport = open_transport(by_order=True)
    transport.begin_step(b"form")
    if rank == 1:
        transport.post_receive(activation(0))
        transport.receive(activation(0))
        transport.send(gradient(0), Packet("", [torch.ones(1)]))
        return ""
    transport.send(activation(0), pack(torch.ones(2, requires_grad=True)))
    transport.post_receive(gradient(0))
    with pytest.raises(LinkLostError) as caught:
        transport.receive(gradient(0))
    return str(caught.value)


def test_message_of_another_form_is_refused_where_order_alone_counts(
    two_processes: Processes,
) -> None:
    assert two_processes.run(send_another_form)[0].startswith(
        "the next message from rank 1 to rank 0 must be number 0, the gradient of microbatch 0 on "
        "edge 0 with form "
    )
