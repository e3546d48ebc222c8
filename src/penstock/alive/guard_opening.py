"""How ranks open their heartbeat, before anything else that they do together.

find who watches whom  ->  meet in the store  ->  connect as a tree  ->  all are here
                                                                   ... the pipeline is built
attach: a flight record, and what must be aborted if a rank is lost

The processes of an elastic run also do so when they start, before torch.distributed runs, and
those of any run in `watching`.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from selectors import PollSelector
from time import monotonic, sleep

import torch.distributed as dist

from penstock.alive.guard import Guard, NoGuard, RankGuard
from penstock.alive.heartbeat import Heartbeat, require_nobody_missing
from penstock.alive.progress_log import ProgressLog
from penstock.alive.reach import find_members
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from penstock.alive.tree.member import Member
from penstock.alive.waker import Waker
from penstock.errors import PeerLostError
from penstock.ranks.private_groups import host_of_store, meet, meet_members
from penstock.ranks.tree.meeting import Contact, Meeting, longest_pause, own_address
from penstock.ranks.tree.shape import ancestors_of
from penstock.torch_private import PrefixStore, Store, get_default_store

__all__ = ["open_guard", "open_guard_of_start", "open_heartbeat", "opening_guard"]

_SHORTEST_PAUSE = 0.002
_WAIT_SECONDS = 0.5


def open_guard(
    group: dist.ProcessGroup, groups: Sequence[tuple[int, ...]], timeouts: Timeouts
) -> Guard:
    """Let the ranks of a pipeline watch one another; every rank calls this, first of all.

    `groups` are the ranks of the processes that hold copies or shards of the stages of this rank.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 and not groups:
        return NoGuard()
    me, (meeting, number, _) = dist.get_rank(), meet(group)
    store = get_default_store()
    members = find_members(
        store, meeting, me, ranks, groups, timeouts.join_seconds, check=require_nobody_missing
    )
    if len(members) == 1:
        return NoGuard()
    name = _own_name()
    is_one = members == ranks
    place, index, _ = meet_members(members)
    heartbeat, progress_log = open_heartbeat(
        Meeting(place, index),
        Member(index, name if is_one else f"rank {number} of its pipeline, {name}", ranks[0]),
        range(len(members)) if is_one else members,
        timeouts,
        address=own_address(host_of_store()),
    )
    places = [members.index(rank) for rank in ranks]
    return RankGuard(heartbeat, progress_log, timeouts, places, members)


@contextmanager
def opening_guard(
    group: dist.ProcessGroup, groups: Sequence[tuple[int, ...]], timeouts: Timeouts
) -> Iterator[Guard]:
    """Open a guard that watches while the ranks build something, and closes if they cannot."""
    guard = open_guard(group, groups, timeouts)
    try:
        with guard.call():
            yield guard
    except Exception:
        guard.close()
        raise


def open_guard_of_start(store: Store, rank: int, size: int, timeouts: Timeouts) -> Guard:
    """Let processes watch one another until they have a pipeline; every rank calls this first."""
    if size == 1:
        return NoGuard()
    heartbeat, progress_log = open_heartbeat(
        Meeting(PrefixStore("penstock/start", store), rank),
        Member(rank, _own_name()),
        range(size),
        timeouts,
        address=own_address(host_of_store(store)),
    )
    return RankGuard(heartbeat, progress_log, timeouts, range(size), range(size))


def open_heartbeat(
    meeting: Meeting, me: Member, numbers: Sequence[int], timeouts: Timeouts, *, address: str
) -> tuple[Heartbeat, ProgressLog]:
    """Connect a rank with those above and below it, and wait until all ranks have come.

    Messages name ranks by their `numbers`.
    """
    token = meeting.make_token() if me.rank == 0 else _find_token(meeting, numbers, timeouts)
    selector, waker = PollSelector(), Waker()
    progress_log = ProgressLog(waker)
    node = HeartbeatNode(me, len(numbers), timeouts, selector, address=address, token=token)
    meeting.publish(Contact(address, node.port, me.name))
    heartbeat = Heartbeat(
        node, selector, timeouts, numbers=numbers, waker=waker, progress_log=progress_log
    )
    try:
        _connect(meeting, node, heartbeat, waker)
    except BaseException:
        heartbeat.close("it could not connect to all ranks")
        raise
    return heartbeat, progress_log


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _connect(meeting: Meeting, node: HeartbeatNode, heartbeat: Heartbeat, waker: Waker) -> None:
    """Give the heartbeat's thread what it needs to connect, until all ranks have come."""
    missing, pause = list(ancestors_of(node.rank)), _SHORTEST_PAUSE
    while not heartbeat.wait_until_complete(pause):
        # Once it can reach the ranks above, the event alone wakes it; a loss may come later.
        require_nobody_missing()
        pause = min(2 * pause, longest_pause(heartbeat.size)) if missing else _WAIT_SECONDS
        for above in list(missing):
            contact = meeting.find(above)
            if contact is not None:
                missing.remove(above)
                node.seeker.add_contact(above, contact)
                waker.wake()


def _find_token(meeting: Meeting, numbers: Sequence[int], timeouts: Timeouts) -> str:
    end, pause = monotonic() + timeouts.join_seconds, _SHORTEST_PAUSE
    while (token := meeting.find_token()) is None:
        if monotonic() >= end:
            raise PeerLostError(
                f"rank {numbers[0]} has not come to build its pipeline within "
                f"{timeouts.join_seconds:g} s",
                numbers[0],
            )
        require_nobody_missing()
        sleep(pause)
        pause = min(2 * pause, longest_pause(len(numbers)))
    return token
