"""Small values between ranks: gathered, shared, and work that all ranks do or none.

Values are those that JSON has. They are never pickled, and they are bounded in size. They travel
over a private gloo group, beside the tensors of a step, so that another thread can abort a wait.

    gather     every rank's value  ->  every rank        one collective while values are short
    collect    every rank's value  ->  the first rank
    scatter    the first rank's values  ->  one to each rank
    send       one rank's value  ->  another rank
    together   work that may fail on a rank  ->  an error on every rank
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, PipelineError
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import PrivateGroup, open_gloo

__all__ = [
    "Control",
    "GroupControl",
    "LocalControl",
    "RankFailure",
    "Refusal",
    "cannot",
    "decode_value",
    "describe_error",
    "encode_value",
    "open_control",
]

# The longest value that may travel: the timeline of a million actions is a third of this.
_MOST_BYTES = 2**28
_LENGTH_BYTES = 8
# How much of a value travels with its length, so that short values need one collective.
_SHORT_BYTES = 248
# The length of a value that its rank could not encode.
_REFUSED = 2**62


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first rank, by its number, that failed at something which all ranks did.

    `own` is the error of this rank, if it failed as well.
    """

    rank: int
    message: str
    own: Exception | None


# Makes the error that a rank raises when work has failed on some rank.
Refusal: TypeAlias = Callable[[RankFailure], Exception]


def cannot(doing: str) -> Refusal:
    """Return a refusal that names the rank and what it was doing; a rank keeps its own error.

    >>> cannot("find a plan")(RankFailure(2, "no room", None))
    PipelineError('rank 2 cannot find a plan: no room')
    """

    def refuse(failure: RankFailure) -> Exception:
        text = f"rank {failure.rank} cannot {doing}: {failure.message}"
        return PipelineError(text) if failure.own is None else failure.own

    return refuse


def describe_error(error: Exception) -> str:
    """Return an error in words for other ranks."""
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def encode_value(value: Any) -> bytes:
    """Return a plain value as one line of JSON."""
    return json.dumps(value).encode()


def decode_value(data: bytes) -> Any:
    """Return the plain value of some JSON; anything else is a `ValueError`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a plain value: {data[:80]!r}") from error


class Control(Protocol):
    """An exchange of plain values with the processes that run the other ranks."""

    @property
    def rank(self) -> int:
        """The number of this process among them."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every process's data in order; all must have the same length."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value in order, on every process."""

    def collect(self, value: Any) -> list[Any]:
        """Return every process's value in order on the first one, and nothing on the others."""

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return this process's own of the values that the first process gives."""

    def broadcast(self, value: Any) -> Any:
        """Return the value that the first process gives."""

    @contextmanager
    def together(self, refuse: Refusal) -> Iterator[None]:
        """Fail on every process if the inside fails on one; it must not wait for another."""

    def abort(self) -> None:
        """End every wait with a `LinkLostError`; any thread may call this."""


class LocalControl:
    """A process that runs all ranks, and speaks for them."""

    rank = 0
    size = 1

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return this process's data."""
        return [data]

    def gather(self, value: Any) -> list[Any]:
        """Return this process's value, as it would arrive elsewhere."""
        return [decode_value(encode_value(value))]

    def collect(self, value: Any) -> list[Any]:
        """Return this process's value."""
        return [value]

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return the only value."""
        (value,) = values
        return value

    def broadcast(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    @contextmanager
    def together(self, refuse: Refusal) -> Iterator[None]:
        """Raise what is made of a failure."""
        try:
            yield
        except Exception as error:
            _raise_failure(refuse, RankFailure(0, describe_error(error), error))

    def abort(self) -> None:
        """Do nothing, because nobody waits."""


class GroupControl:
    """One process among those of a group, or among some `ranks` of it, with its own connections.

    Each of these processes makes one, and calls its methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        members = range(dist.get_world_size(group)) if ranks is None else ranks
        self.connections = Connections()
        self.gloo: PrivateGroup = open_gloo(group, self.connections, ranks)
        self.rank, self.size = members.index(dist.get_rank(group)), len(members)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every process's data, by one small collective on the host."""
        if self.size == 1:
            return [data]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self.gloo.allgather([theirs], [mine]).wait()
        except RuntimeError as error:
            raise LinkLostError(f"a rank is gone: {error}") from error
        return [item.numpy().tobytes() for item in theirs]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value; one that cannot travel is refused by all processes."""
        data, failure = _try_encode(value)
        size = len(data) if failure is None else _REFUSED
        head = size.to_bytes(_LENGTH_BYTES, "big") + data[:_SHORT_BYTES].ljust(_SHORT_BYTES)
        heads = self.gather_bytes(head)
        sizes = [int.from_bytes(each[:_LENGTH_BYTES], "big") for each in heads]
        self._require_sizes(sizes, failure)
        if max(sizes) <= _SHORT_BYTES:
            texts = [each[_LENGTH_BYTES:] for each in heads]
        else:
            texts = self.gather_bytes(data.ljust(max(sizes)))
        return [decode_value(text) for text in texts]

    def collect(self, value: Any) -> list[Any]:
        """Return every process's value in order on the first one, and nothing on the others."""
        if self.rank == 0:
            return [value, *(self.receive(peer) for peer in range(1, self.size))]
        self.send(0, value)
        return []

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return this process's own of the values that the first process gives."""
        if self.rank != 0:
            return self.receive(0)
        for peer in range(1, self.size):
            self.send(peer, values[peer])
        return values[0]

    def broadcast(self, value: Any) -> Any:
        """Return the value that the first process gives."""
        return self.scatter([value] * self.size)

    def send(self, peer: int, value: Any) -> None:
        """Send a value to one process, which calls `receive`."""
        data, failure = _try_encode(value)
        size = len(data) if failure is None else _REFUSED
        self._exchange(peer, self.gloo.send, torch.tensor([size]))
        self._require_sizes([size], failure)
        self._exchange(peer, self.gloo.send, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self, peer: int) -> Any:
        """Return the value that another process sends to this one."""
        length = torch.empty(1, dtype=torch.int64)
        self._exchange(peer, self.gloo.recv, length)
        if int(length) > _MOST_BYTES:
            raise LinkLostError(f"rank {peer} could not send its value")
        data = torch.empty(int(length), dtype=torch.uint8)
        self._exchange(peer, self.gloo.recv, data)
        return decode_value(data.numpy().tobytes())

    @contextmanager
    def together(self, refuse: Refusal) -> Iterator[None]:
        """Fail on every process if the inside fails on one; it must not wait for another."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        messages = self.gather(None if own is None else describe_error(own))
        failed = next((rank for rank, message in enumerate(messages) if message is not None), None)
        if failed is not None:
            # No process leaves, which would end the waits of the others, before all have heard.
            with suppress(LinkLostError):
                self.gather_bytes(b" ")
            _raise_failure(refuse, RankFailure(failed, messages[failed], own))

    def abort(self) -> None:
        """End every wait with a `LinkLostError`; any thread may call this."""
        self.connections.abort()

    def _require_sizes(self, sizes: Sequence[int], own: Exception | None) -> None:
        for rank, size in enumerate(sizes):
            if size > _MOST_BYTES:
                what = "not plain data" if size == _REFUSED else f"{size:,} bytes"
                raise PipelineError(
                    f"a value between ranks must be plain data of at most {_MOST_BYTES:,} bytes "
                    f"(rank {rank} has {what})"
                ) from own

    def _exchange(
        self,
        peer: int,
        start: Callable[[list[torch.Tensor], int, int], dist.Work],
        tensor: torch.Tensor,
    ) -> None:
        try:
            start([tensor], peer, 0).wait()
        except RuntimeError as error:
            raise LinkLostError(f"rank {peer} of {self.size} is gone: {error}") from error


def open_control(group: dist.ProcessGroup | None = None) -> LocalControl | GroupControl:
    """Return the control of a group, else of all processes, else of this process alone."""
    if not dist.is_initialized():
        return LocalControl()
    world = dist.group.WORLD if group is None else group
    assert world is not None, "there is one where torch.distributed is running"
    return GroupControl(world)


def _try_encode(value: Any) -> tuple[bytes, Exception | None]:
    try:
        return encode_value(value), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", error


def _raise_failure(refuse: Refusal, failure: RankFailure) -> None:
    error = refuse(failure)
    if error is failure.own:
        raise error
    raise error from failure.own
