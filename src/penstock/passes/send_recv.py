"""Communication: a send after the work that makes a value, a receive on the rank that uses it.

All messages get one global order in which each could be sent and received at one moment, and every
rank has its messages in that order. So the result finishes even if a send waits for its receive
and both directions of a pair share one queue.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.costs import Costs, price
from penstock.errors import ScheduleError
from penstock.ir.actions import Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import Graph, build_graph
from penstock.ir.rows import Floats, Rows, insert_rows
from penstock.ir.schedule import Schedule
from penstock.passes.stage_actions import end_of_work

__all__ = ["add_send_recv", "add_send_recv_by_cost", "delay_receives"]


def add_send_recv(schedule: Schedule) -> Schedule:
    """Insert sends and receives, each receive where its rank is when the send is reached.

    That is counted in turns: in each turn, every rank does its next piece of work if all that it
    waits for is there.

    >>> print(add_send_recv(Schedule.from_orders([["0F0"], ["1F0"]])))
       rank 0    rank 1
    0  0F0       1RECV_F0
    1  0SEND_F0  1F0
    """
    return _insert_messages(schedule, _turns(schedule, _compute_graph(schedule)))


def add_send_recv_by_cost(schedule: Schedule, costs: Costs) -> Schedule:
    """Insert sends and receives, each receive before the work during which its send happens."""
    graph = _compute_graph(schedule)
    turn = _turns(schedule, graph)
    prices = price(costs, schedule, graph)
    start = _start_times(schedule, graph, prices.duration, prices.busy, prices.lag)
    # Work that ends first comes first; turns settle what costs nothing.
    moment = np.empty(len(turn), dtype=np.int64)
    moment[np.lexsort((turn, start + prices.duration))] = np.arange(len(turn))
    return _insert_messages(schedule, moment[schedule.rows.opening_row()])


def delay_receives(schedule: Schedule) -> Schedule:
    """Move each receive down to the work that uses it, but past no other communication.

    Where every rank has its messages in one global order, as `add_send_recv` lists them, passing
    only compute keeps that order, so the result finishes; check any other schedule again.
    """
    rows, graph = schedule.rows, build_graph(schedule)
    is_receive = rows.is_kind(Kind.RECV_F, Kind.RECV_B)
    barrier = np.where(rows.is_kind(Kind.SEND_F, Kind.SEND_B), np.arange(len(rows)), len(rows))
    user = np.repeat(np.arange(len(rows)), np.diff(graph.first))
    waits = is_receive[graph.need]
    barrier[graph.need[waits]] = rows.opening_row()[user[waits]]
    # Everything before a barrier stays before it, so the nearest barrier below counts.
    nearest = np.minimum.accumulate(barrier[::-1])[::-1]
    place = np.where(is_receive, 2 * nearest, 2 * np.arange(len(rows)) + 1)
    return replace(schedule, rows=rows.take(np.argsort(place, kind="stable"), rows.first))


def _compute_graph(schedule: Schedule) -> Graph:
    if schedule.has_communication:
        raise ScheduleError("the schedule already has sends and receives; lower it only once")
    return build_graph(schedule)


def _turns(schedule: Schedule, graph: Graph) -> NDArray[np.int64]:
    """Return when each row runs, counted in turns; unique to each piece of work."""
    rows, ranks = schedule.rows, schedule.num_ranks
    # Within a turn, a higher rank can use what a lower rank has just done.
    sender, receiver = graph.link // ranks, graph.link % ranks
    lag = np.where((graph.link >= 0) & (sender < receiver), -1.0, 0.0)
    ones = np.ones(len(rows))
    start = _start_times(schedule, graph, ones, ones, lag)
    return start.astype(np.int64) * ranks + rows.rank_of_row()


def _start_times(
    schedule: Schedule, graph: Graph, duration: Floats, busy: Floats, lag: Floats
) -> Floats:
    run = run_in_order(schedule.rows, graph, duration=duration, busy=busy, lag=lag)
    if not run.is_finished:
        raise ScheduleError(
            "the order never finishes, so no message can be placed; check it first"
        )
    return run.start


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """The messages between ranks: the row that makes each, and both stages."""

    maker: NDArray[np.int64]
    stage: NDArray[np.int64]
    peer: NDArray[np.int64]
    is_forward: NDArray[np.bool_]


def _find_messages(schedule: Schedule) -> _Messages:
    """Return the messages of a compute-only schedule, in the order of their makers and edges."""
    rows, holder = schedule.rows, np.array(schedule.placement.rank_of_stage)
    ends = np.array(schedule.dataflow.edges, dtype=np.int64).reshape(-1, 2)
    ends = ends[holder[ends[:, 0]] != holder[ends[:, 1]]]
    parts = []
    for is_forward, kinds in (
        (True, (Kind.FORWARD,)),
        (False, (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)),
    ):
        # An activation goes from producer to consumer, its gradient the other way.
        stage, peer = ends.T if is_forward else ends[np.lexsort(ends.T)].T[::-1]
        makers = np.flatnonzero(rows.is_kind(*kinds))
        fan_out = np.bincount(stage, minlength=schedule.num_stages)
        first_edge = np.concatenate(([0], np.cumsum(fan_out)))
        times = fan_out[rows.stage[makers]]
        maker = np.repeat(makers, times)
        nth = np.arange(len(maker)) - np.repeat(np.cumsum(times) - times, times)
        edge = first_edge[rows.stage[maker]] + nth
        parts.append((maker, stage[edge], peer[edge], np.full(len(maker), is_forward)))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    maker, stage, peer, forward = (column[order] for column in columns)
    return _Messages(maker, stage, peer, forward)


def _insert_messages(schedule: Schedule, moment: NDArray[np.int64]) -> Schedule:
    """Insert a send and a receive per message, on each rank in the order of their moments."""
    rows, messages = schedule.rows, _find_messages(schedule)
    holder = np.array(schedule.placement.rank_of_stage)
    microbatch = rows.microbatch[messages.maker]
    when = moment[messages.maker]
    receiver = holder[messages.peer]
    horizon = int(moment.max(initial=0)) + 1
    by_rank_and_moment = rows.rank_of_row() * np.int64(horizon) + moment
    before = np.concatenate(
        (
            end_of_work(rows, messages.maker),
            np.searchsorted(by_rank_and_moment, receiver * np.int64(horizon) + when),
        )
    )
    send = np.where(messages.is_forward, Kind.SEND_F, Kind.SEND_B)
    receive = np.where(messages.is_forward, Kind.RECV_F, Kind.RECV_B)
    rank = np.concatenate((holder[messages.stage], receiver))
    order = np.argsort(rank * np.int64(horizon) + np.tile(when, 2), kind="stable")
    new = Rows(
        first=np.concatenate(([0], np.cumsum(np.bincount(rank, minlength=rows.num_ranks)))),
        kind=np.concatenate((send, receive)).astype(np.int8)[order],
        stage=np.concatenate((messages.stage, messages.peer)).astype(np.int32)[order],
        microbatch=np.tile(microbatch, 2)[order],
        peer=np.concatenate((messages.peer, messages.stage)).astype(np.int32)[order],
        joined=np.zeros(len(order), dtype=np.bool_),
    )
    return replace(schedule, rows=insert_rows(rows, before[order], new))
