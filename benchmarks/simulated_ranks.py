"""Ranks without a model: the heartbeat and the control tree of each, with real sockets.

    Inner    ranks with others below them: each has its two threads, as in a training process
    Leaves   ranks with nobody below them: all of a process share one thread and one loop

Thousands of threads would measure Python's lock, and not the protocol.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from selectors import DefaultSelector
from typing import Any, TypeVar

from penstock.alive.guard_opening import open_heartbeat
from penstock.alive.heartbeat import Heartbeat
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from penstock.alive.tree.member import Member
from penstock.ranks.tree.links import TreeLinks, open_links
from penstock.ranks.tree.meeting import Contact, Meeting
from penstock.ranks.tree.shape import ancestors_of
from penstock.torch_private import PrefixStore

HOST = "127.0.0.1"
STEPS = 20
TIMEOUTS = Timeouts(silence_seconds=30.0, stop_seconds=60.0, join_seconds=900.0)
LIMIT_SECONDS = 900.0
# What ranks exchange before and after a step: a digest with two flags, and the outcome.
BEFORE, AFTER = bytes(17), bytes(40)
# More ranks than 512 beat less often, as in heartbeat.py.
BEAT_SECONDS, RANKS_AT_FULL_RATE = 0.5, 512
# How often ranks that share a loop look whether one is lost. A heartbeat's thread does so after
# whatever it hears, and twice a second.
LOOK_SECONDS = 0.1
# What all of them report.
STATUS = RankStatus()

Found = TypeVar("Found")


@dataclass
class Learned:
    """Which rank was named as lost, and after how many seconds."""

    named: int | None
    seconds: float


def _links_of(store: Any, rank: int, size: int) -> TreeLinks:
    return open_links(
        Meeting(PrefixStore("links", store), rank), rank, size, address=HOST, seconds=LIMIT_SECONDS
    )


class Inner:
    """A rank with threads of its own."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self._size, self._store = rank, size, store
        self._heartbeat: Heartbeat | None = None
        self._links: TreeLinks | None = None

    def open(self) -> None:
        """Connect, as the building of a pipeline does first."""
        self._heartbeat, _ = open_heartbeat(
            Meeting(PrefixStore("heartbeat", self._store), self.rank),
            Member(self.rank, f"process {self.rank}"),
            range(self._size),
            TIMEOUTS,
            address=HOST,
        )

    def link(self) -> None:
        """Connect for exchanges."""
        self._links = _links_of(self._store, self.rank, self._size)

    def agree(self) -> None:
        """Compare digests, as the ranks of a pipeline do when it is built."""
        assert self._links is not None
        if len(set(self._links.gather(bytes(16)))) != 1:
            raise RuntimeError("the digests differ")

    def step(self) -> None:
        """Exchange what ranks exchange in some steps."""
        assert self._links is not None
        for _ in range(STEPS):
            self._links.gather(BEFORE)
            self._links.gather(AFTER)

    def lose(self, _victim: int) -> list[Learned]:
        """Wait until this rank knows who is lost."""
        assert self._heartbeat is not None
        begin = time.monotonic()
        lost = self._heartbeat.find_lost(LIMIT_SECONDS)
        return [Learned(None if lost is None else lost.rank, time.monotonic() - begin)]

    def close(self) -> None:
        """Leave."""
        if self._heartbeat is not None:
            self._heartbeat.close()


@dataclass
class _Leaf:
    rank: int
    node: HeartbeatNode
    next_beat: float
    links: TreeLinks | None = None
    named: int | None = None
    named_at: float = 0.0


class Leaves:
    """Ranks that share a loop, which does for each what a heartbeat's thread does."""

    def __init__(self, ranks: Sequence[int], size: int, store: Any) -> None:
        self._ranks, self._size, self._store = ranks, size, store
        self._selector = DefaultSelector()
        self._leaves: list[_Leaf] = []
        self._pause = BEAT_SECONDS * max(1.0, size / RANKS_AT_FULL_RATE)
        self._victim: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def open(self) -> None:
        """Connect all of them; they beat from then on, one shortly after the other."""
        begin = time.monotonic()
        for number, rank in enumerate(self._ranks):
            meeting = Meeting(PrefixStore("heartbeat", self._store), rank)
            token = _find(meeting.find_token)
            me = Member(rank, f"process {rank}")
            node = HeartbeatNode(
                me, self._size, TIMEOUTS, self._selector, address=HOST, token=token
            )
            meeting.publish(Contact(HOST, node.port, me.name))
            for above in ancestors_of(rank):
                node.seeker.add_contact(above, _find(partial(meeting.find, above)))
            first = begin + self._pause * number / len(self._ranks)
            self._leaves.append(_Leaf(rank, node, first))
        self._thread.start()
        for leaf in self._leaves:
            if not leaf.node.is_complete.wait(LIMIT_SECONDS):
                raise RuntimeError("not all ranks have come")

    def link(self) -> None:
        """Connect for exchanges."""
        for leaf in self._leaves:
            leaf.links = _links_of(self._store, leaf.rank, self._size)

    def agree(self) -> None:
        """Send every leaf's part and take what all have."""
        self._gather(bytes(16))

    def step(self) -> None:
        """Exchange what ranks exchange in some steps."""
        for _ in range(STEPS):
            self._gather(BEFORE)
            self._gather(AFTER)

    def _gather(self, data: bytes) -> None:
        links = [leaf.links for leaf in self._leaves if leaf.links is not None]
        for one in links:
            one.collect(data)
        for one in links:
            one.broadcast(b"")

    def lose(self, victim: int) -> list[Learned]:
        """Let the victim send nothing any more, and wait until all know who is lost."""
        begin = time.monotonic()
        self._victim = victim
        while any(leaf.named is None for leaf in self._leaves):
            if time.monotonic() - begin > LIMIT_SECONDS:
                break
            time.sleep(0.05)
        return [Learned(leaf.named, leaf.named_at - begin) for leaf in self._leaves]

    def close(self) -> None:
        """End the loop and close all connections."""
        self._is_over.set()
        self._thread.join(LIMIT_SECONDS)
        for leaf in self._leaves:
            leaf.node.close()

    def _loop(self) -> None:
        next_look = time.monotonic()
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.02):
                key.data()
            now = time.monotonic()
            for leaf in self._leaves:
                if now >= leaf.next_beat:
                    leaf.next_beat = now + self._pause
                    if leaf.rank != self._victim:
                        leaf.node.beat(STATUS)
            if now >= next_look:
                next_look = now + LOOK_SECONDS
                for leaf in self._leaves:
                    self._look(leaf, now)

    def _look(self, leaf: _Leaf, now: float) -> None:
        lost = leaf.node.find_lost(STATUS, now)
        if lost is not None and leaf.named is None:
            leaf.named, leaf.named_at = lost.rank, now
            leaf.node.announce(lost)


def _find(find: Callable[[], Found | None]) -> Found:
    """Return what is found in the store; look again and again."""
    end = time.monotonic() + LIMIT_SECONDS
    while (found := find()) is None:
        if time.monotonic() > end:
            raise RuntimeError("not found in the store")
        time.sleep(0.05)
    return found
