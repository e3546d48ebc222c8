"""Channels verify who is at the other end before the first message."""

import torch
import torch.distributed as dist

from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.faults import LinkLostError
from penstock.ranks.ordered_channels import OrderedChannels
from penstock.ranks.private_groups import open_gloo
from tests.processes import Processes


def open_with_wrong_names(rank: int) -> str:
    """Return the error of rank 1 when a channel begins with the name of another one."""
    group = dist.group.WORLD
    assert group is not None
    channels = OrderedChannels(
        lambda _: open_gloo(group, Connections(), (0, 1)), torch.device("cpu")
    )
    try:
        channels.open(rank, [(0, 1)] if rank == 0 else [(2, 1)])
    except LinkLostError as error:
        return str(error)
    return ""


def test_channel_to_the_wrong_rank_is_found_when_it_is_opened(two_processes: Processes) -> None:
    assert two_processes.run(open_with_wrong_names) == [
        "",
        "the channel from rank 2 to rank 1 must begin with these numbers (got [0, 1])",
    ]
