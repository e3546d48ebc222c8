"""Small values between ranks: gathered, shared, and work that all ranks do or none.

Values are those that JSON has. They are never pickled, and they are bounded in size. They travel
along a tree of connections (`ranks/tree/`), beside the tensors of a step, so that another thread
can abort a wait.

    gather     every rank's value  ->  every rank
    collect    every rank's value  ->  the first rank
    scatter    the first rank's values  ->  one to each rank
    send       one rank's value  ->  another rank
    together   work that may fail on a rank  ->  an error on every rank
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, PipelineError
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import (
    PrivateGroup,
    host_of_store,
    meet,
    open_gloo,
    timeout_of,
)
from penstock.ranks.tree.links import open_links
from penstock.ranks.tree.meeting import Meeting, own_address
from penstock.ranks.tree.values import decode_value, encode_value

__all__ = [
    "Control",
    "GroupControl",
    "LocalControl",
    "RankFailure",
    "Refusal",
    "cannot",
    "describe_error",
    "open_control",
]

# The longest value that may travel: the timeline of a million actions is a third of this.
_MOST_BYTES = 2**28
# Begins what is sent in place of a value that cannot be encoded; JSON never begins with it.
_REFUSED = b"\x00"


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

    Each of these processes makes one, and calls its methods in the same order. All `connections`
    can be aborted together, also while they are being opened.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int] | None = None,
        *,
        connections: Connections | None = None,
    ) -> None:
        self._group, self._ranks = group, ranks
        self.connections = Connections() if connections is None else connections
        store, self.rank, self.size = meet(group, ranks)
        self._links = open_links(
            Meeting(store, self.rank),
            self.rank,
            self.size,
            address=own_address(host_of_store()),
            seconds=timeout_of(group).total_seconds(),
            check=self._require_not_aborted,
        )
        for link in self._links.sockets:
            self.connections.add(link)

    @cached_property
    def gloo(self) -> PrivateGroup:
        """A group for tensors and direct messages, opened when all processes first ask for it."""
        return open_gloo(self._group, self.connections, self._ranks)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every process's data."""
        return self._links.gather(data)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value; one that cannot travel is refused by all processes."""
        data, failure = _try_encode(value)
        return _decode_all(self.gather_bytes(data), failure)

    def collect(self, value: Any) -> list[Any]:
        """Return every process's value in order on the first one, and nothing on the others."""
        is_first = self.rank == 0
        # Only what travels has to be plain data.
        data, failure = _try_encode(None if is_first else value)
        found = _decode_all(self._links.collect(data), failure)
        return [value, *found[1:]] if is_first else found

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return this process's own of the values that the first process gives."""
        tried = [_try_encode(value) for value in values] if self.rank == 0 else []
        failure = next((failure for _, failure in tried if failure is not None), None)
        return _decode_all([self._links.scatter([data for data, _ in tried])], failure)[0]

    def broadcast(self, value: Any) -> Any:
        """Return the value that the first process gives."""
        data, failure = _try_encode(value) if self.rank == 0 else (b"", None)
        return _decode_all([self._links.broadcast(data)], failure)[0]

    def send(self, peer: int, value: Any) -> None:
        """Send a value to one process, which calls `receive`."""
        data, failure = _try_encode(value)
        self._exchange(peer, self.gloo.send, torch.tensor([len(data)]))
        self._exchange(peer, self.gloo.send, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        _decode_all([data], failure)

    def receive(self, peer: int) -> Any:
        """Return the value that another process sends to this one."""
        length = torch.empty(1, dtype=torch.int64)
        self._exchange(peer, self.gloo.recv, length)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._exchange(peer, self.gloo.recv, data)
        return _decode_all([data.numpy().tobytes()], None)[0]

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

    def _require_not_aborted(self) -> None:
        if self.connections.is_aborted:
            raise LinkLostError("the connections were aborted")

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


def open_control(
    group: dist.ProcessGroup | None = None, connections: Connections | None = None
) -> LocalControl | GroupControl:
    """Return the control of a group, else of all processes, else of this process alone."""
    if not dist.is_initialized():
        return LocalControl()
    world = dist.group.WORLD if group is None else group
    assert world is not None, "there is one where torch.distributed is running"
    return GroupControl(world, connections=connections)


def _try_encode(value: Any) -> tuple[bytes, Exception | None]:
    """Return a value as it travels, or in its place what keeps it from travelling."""
    try:
        data = encode_value(value)
    except (TypeError, ValueError, RecursionError) as error:
        return _REFUSED + b"not plain data", error
    if len(data) > _MOST_BYTES:
        return _REFUSED + f"{len(data):,} bytes".encode(), None
    return data, None


def _decode_all(everyone: Sequence[bytes], own: Exception | None) -> list[Any]:
    """Return the values of all processes, or raise if one of them cannot travel."""
    for rank, data in enumerate(everyone):
        if data.startswith(_REFUSED):
            what = data.removeprefix(_REFUSED).decode()
            raise PipelineError(
                f"a value between ranks must be plain data of at most {_MOST_BYTES:,} bytes "
                f"(rank {rank} has {what})"
            ) from own
    return [decode_value(data) for data in everyone]


def _raise_failure(refuse: Refusal, failure: RankFailure) -> None:
    error = refuse(failure)
    if error is failure.own:
        raise error
    raise error from failure.own
