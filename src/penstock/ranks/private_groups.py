"""Private groups between some or all ranks of a process group.

Nobody else uses them, so that their connections can be aborted. They are not in torch's list of
groups either, which would keep them open as long as the program runs. A rank need not know of
groups that it does not belong to: a group is identified by its members, in order, and by how many
groups these members have opened before.
"""

from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.faults import NAN_BYTE
from penstock.torch_private import (
    PrefixStore,
    Store,
    TCPStore,
    get_default_store,
)

__all__ = [
    "NcclWire",
    "PrivateGroup",
    "StartedWork",
    "Wire",
    "host_of_store",
    "meet",
    "meet_members",
    "open_gloo",
    "open_like",
    "open_nccl",
    "timeout_of",
]


class StartedWork(Protocol):
    """Communication that was started."""

    def wait(self) -> Any:
        """Wait until it is done, on a device by letting the current stream wait."""


class Wire(Protocol):
    """What carries the tensors of a channel; peers are numbered within it."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StartedWork:
        """Start to send; messages of one tag arrive in order."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StartedWork:
        """Start to receive."""

    def abort(self) -> None:
        """End pending operations; NCCL does, but for gloo its connections must be aborted."""


class PrivateGroup(Protocol):
    """The methods of torch's backends that we use; peers are numbered within the group."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start to send; messages of one tag arrive in order."""

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        """Start to receive."""

    def allgather(self, into: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> dist.Work:
        """Start to give every rank's tensor to all."""

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        """Start to sum a tensor over all ranks."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Start to give one rank's tensor to all."""

    def abort(self) -> None:
        """End pending operations; NCCL does, but for gloo its connections must be aborted."""


def open_gloo(
    group: dist.ProcessGroup, connections: Connections, ranks: Sequence[int] | None = None
) -> PrivateGroup:
    """Connect ranks of a group for host memory; all of them call it, equally often."""
    with connections.tracking():
        # A connection of its own to the store, so that a wait there can be aborted too. The type
        # stubs leave out this method.
        shared: Any = get_default_store()
        store, rank, size = meet(group, ranks, shared.clone())
        backend = dist.ProcessGroupGloo(store, rank, size, timeout_of(group))
    # The type stubs leave out a backend's operations.
    return cast("PrivateGroup", backend)


def open_nccl(
    group: dist.ProcessGroup,
    ranks: Sequence[int] | None = None,
    *,
    device: torch.device | None = None,
    most_blocks: int | None = None,
) -> PrivateGroup:
    """Connect ranks of a group for device memory; all of them call it, equally often.

    With `device` they connect now, and not when the first message goes. At most `most_blocks`
    multiprocessors carry a message.
    """
    store, rank, size = meet(group, ranks)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout_of(group)
    if most_blocks is not None:
        options.config.max_ctas = most_blocks
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    if device is not None:
        backend.eager_connect_single_device(device)
    return cast("PrivateGroup", backend)


class NcclWire:
    """A communicator of two ranks, for messages in one direction.

    Each message is a batch of one: torch warns of messages outside a batch, for which a group of
    more than two ranks would open further communicators.
    """

    def __init__(
        self, group: dist.ProcessGroup, pair: Sequence[int], device: torch.device, most_blocks: int
    ) -> None:
        self._backend: Any = open_nccl(group, pair, device=device, most_blocks=most_blocks)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StartedWork:
        """Start to send, after what is in the current stream."""
        self._backend._start_coalescing()
        self._backend.send(tensors, peer, tag)
        work: StartedWork = self._backend._end_coalescing()
        return work

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> StartedWork:
        """Start to receive bytes, after what is in the current stream."""
        for tensor in tensors:
            # What is left if the communicator is aborted before the message has come.
            tensor.fill_(NAN_BYTE)
        self._backend._start_coalescing()
        self._backend.recv(tensors, peer, tag)
        work: StartedWork = self._backend._end_coalescing()
        return work

    def abort(self) -> None:
        """End pending operations and free the communicator."""
        self._backend.abort()


def open_like(
    group: dist.ProcessGroup, connections: Connections, ranks: Sequence[int]
) -> PrivateGroup:
    """Connect ranks of a group for the kind of memory that the group's backend handles."""
    if dist.get_backend(group) == "gloo":
        return open_gloo(group, connections, ranks)
    return open_nccl(group, ranks)


def meet(
    group: dist.ProcessGroup, ranks: Sequence[int] | None = None, store: Store | None = None
) -> tuple[PrefixStore, int, int]:
    """Return the store in which the members meet, this rank's number and their count.

    Every meeting of the same members gets a part of the store that no other meeting uses.
    """
    everyone = dist.get_process_group_ranks(group)
    members = everyone if ranks is None else [everyone[rank] for rank in ranks]
    return meet_members(members, store)


def meet_members(
    members: Sequence[int], store: Store | None = None
) -> tuple[PrefixStore, int, int]:
    """Return the same for processes by their ranks among all of them, in order."""
    number = list(members).index(dist.get_rank())
    store = get_default_store() if store is None else store
    name = "penstock/" + sha256(repr(list(members)).encode()).hexdigest()[:16]
    opened = store.add(f"{name}/{number}", 1)
    return PrefixStore(f"{name}/group{opened}", store), number, len(members)


def host_of_store(store: Store | None = None) -> str | None:
    """Return the host of a store, or of the one that all processes share, if it has one."""
    store = get_default_store() if store is None else store
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a wait may take: as in the user's group, if that has the same backend."""
    if dist.get_backend(group) != "gloo":
        return default_pg_timeout
    return group._get_backend(torch.device("cpu")).options._timeout
