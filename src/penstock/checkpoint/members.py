"""The processes that save and load together, and how they speak: in JSON."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.errors import CheckpointError, PenstockError
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import PrivateGroup, open_gloo

__all__ = ["Members", "describe_failure"]

T = TypeVar("T")


class Members:
    """Processes that save together: those of a group, else of the whole world, else this one.

    They speak over connections of their own, so that a thread may do so beside the training.
    Values are those that JSON has.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._gloo: PrivateGroup | None = None
        self._connections = Connections()
        self.rank, self.count = 0, 1
        if dist.is_initialized():
            world = dist.group.WORLD if group is None else group
            assert world is not None, "there is one where torch.distributed is running"
            self._gloo = open_gloo(world, self._connections)
            self.rank, self.count = dist.get_rank(world), dist.get_world_size(world)

    @property
    def is_first(self) -> bool:
        """Whether this process decides for all."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order, on every process."""
        values: list[Any] = self.share(self.collect(value))
        return values

    def collect(self, value: Any) -> list[Any]:
        """Every process's value, in order, on the first process; nothing on the others."""
        if self.is_first:
            return [value, *(self._receive(peer) for peer in range(1, self.count))]
        self._send(0, value)
        return []

    def scatter(self, values: Sequence[Any]) -> Any:
        """Each process's own of the values that the first process has."""
        if not self.is_first:
            return self._receive(0)
        for peer in range(1, self.count):
            self._send(peer, values[peer])
        return values[0]

    def hang_up(self) -> None:
        """End all talks; a thread that still waits for another process gets an error."""
        self._connections.hang_up()

    def _send(self, peer: int, value: Any) -> None:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        self._exchange(peer, lambda gloo: gloo.send([length], peer, 0))
        self._exchange(peer, lambda gloo: gloo.send([data], peer, 0))

    def _receive(self, peer: int) -> Any:
        length = torch.empty(1, dtype=torch.int64)
        self._exchange(peer, lambda gloo: gloo.recv([length], peer, 0))
        data = torch.empty(int(length), dtype=torch.uint8)
        self._exchange(peer, lambda gloo: gloo.recv([data], peer, 0))
        return json.loads(data.numpy().tobytes())

    def _exchange(self, peer: int, start: Callable[[PrivateGroup], dist.Work]) -> None:
        assert self._gloo is not None, "a process that is alone has no peers"
        try:
            start(self._gloo).wait()
        except RuntimeError as error:
            raise LinkLostError(
                f"rank {peer}, which saves and loads together with this one, is gone: {error}"
            ) from error

    def share(self, value: Any) -> Any:
        """The value that the first process has."""
        return self.scatter([value] * self.count)

    def together(self, work: Callable[[], T]) -> T:
        """Do work that may fail on some process, and then fails on every one."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        told = self.gather(None if failure is None else describe_failure(failure))
        failed = {rank: message for rank, message in enumerate(told) if message is not None}
        if failed:
            rank, message = next(iter(failed.items()))
            prefix = f"rank {rank}: " if self.count > 1 else ""
            raise CheckpointError(f"{prefix}{message}") from failure
        return result  # type: ignore[return-value]  # it is there where nothing has failed


def describe_failure(error: Exception) -> str:
    """What went wrong, in words for the other processes."""
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
