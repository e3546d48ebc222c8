"""What messages take from ranks that compute on the processor, beside computing itself.

alone      compute          compute          compute          compute
beside     compute  send 0  compute  send 1  compute  send 2  compute     the same compute, with
                            receive 0        receive 1        receive 2   messages in between

On processors, threads of the library carry messages. Where as many ranks compute as there are
cores, these threads take their time from the compute, and one that runs while a rank sends may
keep it waiting for as long as the operating system lets it run. Round trips between ranks that do
nothing else show none of that.
"""

from time import perf_counter

import numpy as np
import torch

from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Message
from penstock.tensors.packet import Packet

__all__ = ["time_busy_messages"]

# Messages of a round, and the products between two of them, which take less than a millisecond.
_MESSAGES, _PRODUCTS, _SIDE = 8, 16, 128
_BYTES = 64 << 10


def time_busy_messages(transport: GroupTransport, repeats: int) -> float:
    """Return the seconds that a message takes from each of its ranks while all ranks compute.

    Every rank calls it, and sends to the next one in a ring. All get the same mean: what keeps a
    rank waiting is rare and long, so that a median would not show it.
    """
    with torch.no_grad():
        # The first two rounds learn shapes and warm up.
        rounds = [_time_round(transport, number) for number in range(repeats + 2)][2:]
    mine = float(np.mean(rounds)) / (2 * _MESSAGES)
    return max(0.0, float(np.mean(transport.control.gather(mine))))


def _time_round(transport: GroupTransport, number: int) -> float:
    """Return by how much longer computing takes with messages; which comes first takes turns."""
    transport.control.gather(None)
    if number % 2:
        return _compute_beside(transport) - _compute_alone()
    alone = _compute_alone()
    return _compute_beside(transport) - alone


def _compute_alone() -> float:
    begin = perf_counter()
    for _ in range(_MESSAGES + 1):
        _compute()
    return perf_counter() - begin


def _compute_beside(transport: GroupTransport) -> float:
    ranks, rank = transport.num_ranks, transport.ranks[0]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    packet = Packet("T", [torch.zeros(_BYTES, dtype=torch.uint8)])
    sent = [Message(True, rank, number, rank, after) for number in range(_MESSAGES)]
    received = [Message(True, before, number, before, rank) for number in range(_MESSAGES)]
    transport.begin_step(b"busy")
    for message in received:
        transport.post_receive(message)
    begin = perf_counter()
    _compute()
    for there, here in zip(sent, received, strict=True):
        transport.send(there, packet)
        _compute()
        transport.receive(here)
    seconds = perf_counter() - begin
    transport.end_step()
    transport.remember_shapes()
    return seconds


def _compute() -> None:
    factor = torch.full((_SIDE, _SIDE), 1 / _SIDE)
    product = factor
    for _ in range(_PRODUCTS):
        product = factor @ product
