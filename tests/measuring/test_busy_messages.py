"""What messages take from ranks that compute."""

from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from penstock.measuring.busy_messages import time_busy_messages
from penstock.ranks.group_transport import GroupTransport
from tests.processes import Processes

# Longer than anything else that a message takes on a quiet machine.
SECONDS = 0.004


class SlowToSend:
    """A transport whose sends occupy their rank for some time."""

    def __init__(self, transport: GroupTransport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, *given: Any) -> None:
        end = perf_counter() + SECONDS
        self._transport.send(*given)
        while perf_counter() < end:
            pass


def time_both(_rank: int) -> tuple[float, float]:
    assert dist.group.WORLD is not None
    transport = GroupTransport(dist.group.WORLD, torch.device("cpu"))
    transport.open_channels({(0, 1): 2, (1, 0): 2})
    plain = time_busy_messages(transport, 2)
    slow = time_busy_messages(SlowToSend(transport), 2)  # type: ignore[arg-type]  # an honest fake
    transport.close()
    return plain, slow


# Round trips between idle ranks showed 0.04 ms of a message whose rank lost several times that.
def test_what_a_send_takes_from_the_compute_is_found(two_processes: Processes) -> None:
    first, second = two_processes.run(time_both)
    assert first == second
    plain, slow = first
    assert plain >= 0
    # Half of it is the sender's, half the receiver's.
    assert slow >= 0.4 * SECONDS
