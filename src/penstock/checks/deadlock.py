"""Deadlocks: does a schedule finish if sends wait for receives and messages keep their order?

The model is the strictest that real transports follow. A send blocks its rank until the receive is
posted; a receive is posted without waiting; compute waits until its messages have arrived.
Messages on one channel are matched in order. A channel is either a direction of a pair of ranks
("directed"), or both directions of a pair ("shared"), where a send also waits for the messages
before it in the queue.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.checks.problem import Problem, at_row
from penstock.errors import ArgumentError
from penstock.ir.actions import Kind
from penstock.ir.clock import Run, find_cycle, run_in_order
from penstock.ir.graph import NeedList, build_graph, join_needs
from penstock.ir.lookup import edge_of_row
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule
from penstock.ir.wording import WORDING

__all__ = ["Channels", "find_deadlock"]

Channels: TypeAlias = Literal["directed", "shared"]


def find_deadlock(schedule: Schedule, channels: Channels = "directed") -> Iterator[Problem]:
    """Find the first problem that keeps a complete schedule from finishing."""
    graph = build_graph(schedule)
    if schedule.has_communication:
        queues = _Queues(schedule, channels)
        mismatch = queues.find_mismatch()
        if mismatch is not None:
            yield mismatch
            return
        graph = join_needs(len(schedule.rows), queues.needs(), graph)
    ones, lag = np.ones(len(schedule.rows)), np.zeros(len(graph.need))
    run = run_in_order(schedule.rows, graph, duration=ones, busy=ones, lag=lag)
    if not run.is_finished:
        yield _describe_cycle(schedule, run)


class _Queues:
    """The communications of a schedule, sorted by channel and by the order on each side."""

    def __init__(self, schedule: Schedule, channels: Channels) -> None:
        self.schedule = schedule
        self.channels = channels
        self.edge = edge_of_row(schedule)
        rows, ranks = schedule.rows, schedule.num_ranks
        holder = np.array(schedule.placement.rank_of_stage)
        talks = np.flatnonzero(rows.is_kind(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B))
        is_send = rows.is_kind(Kind.SEND_F, Kind.SEND_B)[talks]
        here, there = holder[rows.stage[talks]], holder[rows.peer[talks]]
        match channels:
            case "directed":
                is_near = is_send
                channel = np.where(is_send, here * ranks + there, there * ranks + here)
            case "shared":
                is_near = here < there
                channel = np.where(is_near, here * ranks + there, there * ranks + here)
            case _:
                raise ArgumentError(f"channels must be 'directed' or 'shared' (got {channels!r})")
        # Both sides are sorted alike: a message must have the same place on both.
        self.near = _by_channel(talks[is_near], channel[is_near])
        self.far = _by_channel(talks[~is_near], channel[~is_near])
        self.channel = np.sort(channel[is_near], kind="stable")

    def find_mismatch(self) -> Problem | None:
        """Find the first place where the two sides of a channel list different messages."""
        wrong = np.flatnonzero(self._message(self.near) != self._message(self.far))
        if not wrong.size:
            return None
        mine, theirs = int(self.near[wrong[0]]), int(self.far[wrong[0]])
        rank, position = self.schedule.rows.position(theirs)
        message = (
            f"the other side of its channel is at {self.schedule.rows.action(theirs)} on rank "
            f"{rank}, position {position}; both sides must list their messages in one order"
        )
        return at_row(self.schedule, mine, "channel order", message)

    def needs(self) -> list[NeedList]:
        """Return what sends wait for: their receives, and in a shared queue earlier messages."""
        is_send = self.schedule.rows.is_kind(Kind.SEND_F, Kind.SEND_B)[self.near]
        send = np.where(is_send, self.near, self.far)
        receive = np.where(is_send, self.far, self.near)
        lists = [_need_list(send, receive)]
        if self.channels == "shared":
            follows = self.channel[1:] == self.channel[:-1]
            lists.append(_need_list(send[1:][follows], send[:-1][follows]))
        return lists

    def _message(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number for the message of each communication, the same on both sides."""
        rows = self.schedule.rows
        is_forward = rows.is_kind(Kind.SEND_F, Kind.RECV_F)[row]
        edge = self.edge[row].astype(np.int64)
        return (edge * self.schedule.microbatches + rows.microbatch[row]) * 2 + is_forward


def _by_channel(row: NDArray[np.int64], channel: NDArray[np.int64]) -> NDArray[np.int64]:
    return row[np.argsort(channel, kind="stable")]


def _need_list(row: NDArray[np.int64], need: NDArray[np.int64]) -> NeedList:
    local = np.full(len(row), ABSENT, dtype=np.int64)
    return NeedList(row, need.astype(np.int32), local)


def _describe_cycle(schedule: Schedule, run: Run) -> Problem:
    """Return the cycle of waits, one rank per line."""
    rows, cycle = schedule.rows, find_cycle(schedule.rows, run)

    def place(row: int) -> str:
        rank, position = rows.position(row)
        return WORDING["place"].format(rank=rank, position=position, action=rows.action(row))

    waits = ((int(run.stuck_at[rank]), int(run.waits_for[rank])) for rank in cycle)
    lines = [
        "  " + WORDING["wait"].format(stuck=place(stuck), awaited=place(awaited))
        for stuck, awaited in waits
    ]
    problem = at_row(schedule, int(run.stuck_at[cycle[0]]), "deadlock", WORDING["deadlock"])
    return replace(problem, neighbourhood="\n".join(lines))
