"""Messages between ranks, as torch's point-to-point operations."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["Outgoing", "ReceiveQueue", "_batch_p2p", "_sorted_batch_p2p", "_wait_batch_p2p"]

# How many sends to a rank may be under way before the next one waits for the oldest.
_SENDS_AHEAD = 4


def _batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[Any]:  # noqa: ARG001  # torch's form
    """Start operations: each for itself if all go one way, else as one batch."""
    kinds = {op.op for op in p2p_ops}
    if not kinds:
        return []
    if kinds == {dist.isend}:
        return [
            op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in p2p_ops
        ]
    if kinds == {dist.irecv}:
        return [
            op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer) for op in p2p_ops
        ]
    return list(dist.batch_isend_irecv(p2p_ops))


def _sorted_batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start operations rank by rank, in rising order of ranks; the works of each rank."""
    peers = sorted({op.peer for op in p2p_ops})
    return {peer: _batch_p2p([op for op in p2p_ops if op.peer == peer], desc) for peer in peers}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait until operations are done."""
    for item in work:
        item.wait()


class Outgoing:
    """Sends that are under way, by the rank that they go to."""

    def __init__(self) -> None:
        self._works: dict[int, deque[Sequence[Any]]] = {}

    def add(self, rank: int, works: Sequence[Any], *, may_wait: bool) -> None:
        """Keep a send going; if that is safe, wait for one that began long before."""
        queue = self._works.setdefault(rank, deque())
        queue.append(works)
        while may_wait and len(queue) > _SENDS_AHEAD:
            _wait_batch_p2p(queue.popleft())

    def wait(self) -> None:
        """Wait for all."""
        for queue in self._works.values():
            while queue:
                _wait_batch_p2p(queue.popleft())

    def clear(self) -> None:
        """Let go of all, after a step that failed."""
        self._works.clear()


class _LateReceive:
    """A receive that is started when somebody waits for it, since its shape is not known yet."""

    def __init__(
        self, queue: "list[_LateReceive]", peers: frozenset[int], start: Callable[[], list[Any]]
    ) -> None:
        self._queue = queue
        self.peers = peers
        self._start = start
        self._works: list[Any] = []

    def start(self) -> None:
        """Find out what comes, and post the receive."""
        self._queue.remove(self)
        self._works = self._start()

    def wait(self) -> None:
        """Start those posted before this one from the same ranks, then it, and wait for it."""
        if self in self._queue:
            before = self._queue[: self._queue.index(self) + 1]
            for receive in [late for late in before if late.peers & self.peers]:
                receive.start()
        _wait_batch_p2p(self._works)


class ReceiveQueue:
    """Receives in the order in which their messages are sent, some of them not started yet."""

    def __init__(self) -> None:
        self._late: list[_LateReceive] = []

    def post(
        self, peers: frozenset[int], start: Callable[[], list[Any]], *, is_known: bool
    ) -> list[Any]:
        """Post a receive now, or when it is waited for; messages of one rank keep their order."""
        if is_known and not any(late.peers & peers for late in self._late):
            return start()
        late = _LateReceive(self._late, peers, start)
        self._late.append(late)
        return [late]

    def start_from(self, rank: int) -> None:
        """Find out what comes from a rank, and post its receives."""
        for late in [late for late in self._late if rank in late.peers]:
            late.start()

    def clear(self) -> None:
        """Let go of all, after a step that failed."""
        self._late.clear()
