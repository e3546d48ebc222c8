"""How the processes that torchrun has started meet, before torch.distributed runs.

torch's own meeting waits for a process that never comes as long as an operation of a group may
take, half an hour. Here the wait has a limit of its own, and ranks can name who is missing.
"""

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from penstock.errors import ArgumentError, PeerLostError
from penstock.torch_private import Store, TCPStore

__all__ = ["meet_at_start"]

_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def meet_at_start(seconds: float) -> tuple[Store, int, int]:
    """Return the store of all processes, this one's rank and their count.

    Others may not be there yet. If nobody has opened the store within `seconds`, rank 0 is lost.
    """
    if missing := [name for name in _NEEDED if name not in os.environ]:
        raise ArgumentError(
            f"the environment must have {', '.join(_NEEDED)} (it lacks {', '.join(missing)}); "
            "start the program with python -m penstock.elastic, or call init_process_group first"
        )
    address, port, rank, size = (os.environ[name] for name in _NEEDED)
    is_opened_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Longer waits than a day mean no limit, and the store takes whole milliseconds.
    limit = timedelta(seconds=min(seconds, 86_400.0))
    try:
        store = TCPStore(
            address,
            int(port),
            is_master=rank == "0" and not is_opened_by_agent,
            timeout=limit,
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise PeerLostError(
            f"rank 0 has not opened the store at {address}, port {port}, within {seconds:g} s: "
            f"{error}",
            0,
        ) from error
    store.set_timeout(default_pg_timeout)
    return store, int(rank), int(size)
