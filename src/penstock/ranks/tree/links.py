"""Exchanges along the tree, with a blocking connection to the rank above and to those below.

    gather     every rank sends what it and the ranks below it have; rank 0 sends all of it down
    collect    the first half of that
    scatter    rank 0 sends to each child what is for the ranks in that subtree

A frame is its length and a list of entries, one per rank, with their lengths before them.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from selectors import DefaultSelector
from time import monotonic, sleep
from typing import NamedTuple, TypeVar
from weakref import finalize

from penstock.errors import PipelineError
from penstock.ranks.faults import LinkLostError
from penstock.ranks.tree.admission import Listener, NotAdmittedError, call
from penstock.ranks.tree.json_connection import JsonConnection
from penstock.ranks.tree.meeting import Contact, Meeting, longest_pause
from penstock.ranks.tree.shape import children_of, parent_of, subtree_of

__all__ = ["TreeLinks", "open_links"]

_LENGTH = struct.Struct(">Q")
_TIMEOUT = struct.Struct("ll")
# How often a rank looks for another one that has not come yet.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_CALL_SECONDS = 10.0

Found = TypeVar("Found")


class _Link(NamedTuple):
    """A connection, and whom it leads to."""

    socket: socket.socket
    name: str


class TreeLinks:
    """One rank's connections, which one thread uses at a time; another one may shut them down."""

    def __init__(
        self,
        rank: int,
        size: int,
        parent: socket.socket | None,
        children: Sequence[socket.socket],
    ) -> None:
        self.rank, self.size = rank, size
        self._parent: _Link | None = None
        if parent is not None:
            self._parent = _Link(parent, f"rank {parent_of(rank)} of {size}")
        self._children = [
            _Link(child, f"rank {number} of {size}")
            for number, child in zip(children_of(rank, size), children, strict=True)
        ]
        self._subtrees = [subtree_of(child, size) for child in children_of(rank, size)]
        self._order = subtree_of(0, size)
        finalize(self, _close, [*([parent] if parent else []), *children])

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The connections, to be shut down if a wait must end."""
        links = self._children if self._parent is None else [self._parent, *self._children]
        return tuple(link.socket for link in links)

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's data in order, on every rank."""
        mine = self._collect(data)
        if self._parent is None:
            whole = _pack(_in_order(mine, self._order))
        else:
            _send_frame(self._parent, _pack(mine))
            whole = _receive_frame(self._parent)
        for child in self._children:
            _send_frame(child, whole)
        return _unpack(whole, self.size)

    def collect(self, data: bytes) -> list[bytes]:
        """Return every rank's data in order on rank 0, and nothing on the others."""
        mine = self._collect(data)
        if self._parent is None:
            return _in_order(mine, self._order)
        _send_frame(self._parent, _pack(mine))
        return []

    def scatter(self, everyone: Sequence[bytes]) -> bytes:
        """Return this rank's own of the data that rank 0 gives for each rank."""
        if self._parent is None:
            mine = [everyone[rank] for rank in self._order]
        else:
            count = 1 + sum(map(len, self._subtrees))
            mine = _unpack(_receive_frame(self._parent), count)
        position = 1
        for child, subtree in zip(self._children, self._subtrees, strict=True):
            _send_frame(child, _pack(mine[position : position + len(subtree)]))
            position += len(subtree)
        return mine[0]

    def broadcast(self, data: bytes) -> bytes:
        """Return the data that rank 0 gives."""
        whole = data if self._parent is None else _receive_frame(self._parent)
        for child in self._children:
            _send_frame(child, whole)
        return whole

    def _collect(self, data: bytes) -> list[bytes]:
        """Return the data of this rank and of those below, in the order of the subtree."""
        found = [data]
        for child, subtree in zip(self._children, self._subtrees, strict=True):
            found += _unpack(_receive_frame(child), len(subtree))
        return found


def open_links(
    meeting: Meeting,
    rank: int,
    size: int,
    *,
    address: str,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> TreeLinks:
    """Connect to the ranks above and below; every rank calls this.

    A wait for another rank ends after `seconds`, or when `check` raises.
    """
    end = monotonic() + seconds

    def late(waits_for: str) -> LinkLostError | None:
        check()
        if monotonic() < end:
            return None
        return LinkLostError(f"{waits_for} has not come within {seconds:g} s")

    if rank == 0:
        token = meeting.make_token()
    else:
        token = _wait(meeting.find_token, size, lambda: late("rank 0"))
    below: dict[int, JsonConnection] = {}
    expected = children_of(rank, size)
    parent: JsonConnection | None = None
    with DefaultSelector() as selector:
        listener = None
        try:
            if expected:

                def admit(caller: int, connection: JsonConnection) -> None:
                    if caller not in expected:
                        connection.close()
                        return
                    if caller in below:
                        # It calls again if it gave up the connection before.
                        below[caller].close()
                    below[caller] = connection

                listener = Listener(selector, address, token, admit)
                meeting.publish(Contact(address, listener.port, ""))
            if rank > 0:
                parent = _call_parent(meeting, rank, size, token, late)
            while listener is not None and len(below) < len(expected):
                for key, _ in selector.select(_LONGEST_PAUSE):
                    key.data()
                listener.drop_late(monotonic())
                missing = next((child for child in expected if child not in below), None)
                if missing is not None and (error := late(f"rank {missing}")) is not None:
                    raise error
        except BaseException:
            for connection in (*below.values(), *([parent] if parent else [])):
                connection.close()
            raise
        finally:
            if listener is not None:
                listener.close()
    return TreeLinks(
        rank,
        size,
        None if parent is None else _blocking(parent, seconds),
        [_blocking(below[child], seconds) for child in expected],
    )


def _call_parent(
    meeting: Meeting, rank: int, size: int, token: str, late: Callable[[str], LinkLostError | None]
) -> JsonConnection:
    above = parent_of(rank)
    contact = _wait(lambda: meeting.find(above), size, lambda: late(f"rank {above}"))
    while True:
        try:
            return call(
                contact.address, contact.port, token=token, rank=rank, seconds=_CALL_SECONDS
            )
        except ConnectionRefusedError as error:
            raise LinkLostError(f"rank {above} is gone: {error}") from error
        except (OSError, NotAdmittedError) as error:
            # Unknown callers may take all places for a while.
            if late(f"rank {above}") is not None:
                raise LinkLostError(
                    f"rank {rank} cannot reach rank {above} at {contact.address}, port "
                    f"{contact.port}: {error}; let the machines of a group open connections to "
                    "one another"
                ) from error
            sleep(_LONGEST_PAUSE)


def _wait(
    find: Callable[[], Found | None], size: int, late: Callable[[], Exception | None]
) -> Found:
    """Return what is found in the store; look again and again, at first often."""
    pause = _SHORTEST_PAUSE
    while (found := find()) is None:
        if (error := late()) is not None:
            raise error
        sleep(pause)
        pause = min(2 * pause, longest_pause(size))
    return found


def _blocking(connection: JsonConnection, seconds: float) -> socket.socket:
    """Return a socket on which waits end after this time."""
    link = connection.detach()
    link.setblocking(True)
    limit = _TIMEOUT.pack(int(min(seconds, 2**31)), int(seconds % 1 * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return link


def _in_order(found: Sequence[bytes], order: Sequence[int]) -> list[bytes]:
    """Return what was found in the order of a subtree by rank instead."""
    by_rank = [b""] * len(order)
    for rank, data in zip(order, found, strict=True):
        by_rank[rank] = data
    return by_rank


def _pack(entries: Sequence[bytes]) -> bytes:
    """Return a frame: whether all entries are equally long, their lengths, and their bytes."""
    lengths = set(map(len, entries))
    is_even = len(lengths) <= 1
    heads = lengths if is_even else map(len, entries)
    return b"".join([b"=" if is_even else b"!", *map(_LENGTH.pack, heads), *entries])


def _unpack(frame: bytes, count: int) -> list[bytes]:
    """Return the entries; ranks exchange thousands in a step, mostly equally long ones."""
    is_even, step = frame[:1] == b"=", _LENGTH.size
    position = 1 + step * (1 if is_even else count)
    lengths = [int.from_bytes(frame[i : i + step], "big") for i in range(1, position, step)]
    end = position + (count * lengths[0] if is_even else sum(lengths))
    if end != len(frame) or not frame:
        raise PipelineError("ranks exchange different values at one time; let all make one call")
    if is_even and lengths[0]:
        return [frame[i : i + lengths[0]] for i in range(position, end, lengths[0])]
    entries = []
    for length in lengths * count if is_even else lengths:
        entries.append(frame[position : position + length])
        position += length
    return entries


def _send_frame(link: _Link, data: bytes) -> None:
    try:
        link.socket.sendall(_LENGTH.pack(len(data)) + data)
    except OSError as error:
        raise LinkLostError(f"{link.name} is gone: {error}") from error


def _receive_frame(link: _Link) -> bytes:
    (length,) = _LENGTH.unpack(_receive(link, _LENGTH.size))
    return _receive(link, length)


def _receive(link: _Link, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            piece = link.socket.recv(min(length - len(data), 2**20), socket.MSG_WAITALL)
        except OSError as error:
            raise LinkLostError(f"{link.name} is gone: {error}") from error
        if not piece:
            raise LinkLostError(f"{link.name} is gone: its connection was closed")
        data += piece
    return bytes(data)


def _close(links: Sequence[socket.socket]) -> None:
    for link in links:
        link.close()
