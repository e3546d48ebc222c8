"""The rules for what lowering adds: messages, gathered parameters, gradient reduction."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.checks.complete import expected_work
from penstock.checks.problem import Problem, at_row
from penstock.ir.actions import Action, Kind
from penstock.ir.lookup import Lookup, find_rows
from penstock.ir.rows import ABSENT, Bools
from penstock.ir.schedule import Schedule

__all__ = ["find_message_problems", "find_stage_problems"]


def find_message_problems(schedule: Schedule) -> Iterator[Problem]:
    """Find messages that are missing, repeated, unneeded, or at the wrong time.

    In a schedule without any communication all messages are implied, so there are none.
    """
    if not schedule.has_communication:
        return
    rows, lookup = schedule.rows, find_rows(schedule)
    edge = lookup.edge
    holder = np.array(schedule.placement.rank_of_stage)
    ends = np.array(schedule.dataflow.edges, dtype=np.int64).reshape(-1, 2)
    crosses = holder[ends[:, 0]] != holder[ends[:, 1]]
    talks = rows.is_kind(Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    for row in np.flatnonzero(talks & (edge == ABSENT)):
        message = f"stages {rows.stage[row]} and {rows.peer[row]} do not feed each other"
        yield at_row(schedule, int(row), "messages", message)
    if len(crosses):
        for row in np.flatnonzero(talks & (edge != ABSENT) & ~crosses[edge]):
            message = "both stages are on this rank; no message is needed"
            yield at_row(schedule, int(row), "messages", message)
    expected = expected_work(schedule)[ends[:, 0]] & crosses[:, None]
    yield from _find_miscounted(schedule, edge, ends, expected)
    yield from _find_untimely(schedule, lookup, ends)


def _find_miscounted(
    schedule: Schedule, edge: NDArray[np.int32], ends: NDArray[np.int64], expected: Bools
) -> Iterator[Problem]:
    rows, microbatches = schedule.rows, schedule.microbatches
    nothing = np.zeros_like(expected)
    for kind, wanted in (
        (Kind.SEND_F, expected),
        (Kind.RECV_F, expected),
        (Kind.SEND_B, nothing if schedule.is_forward_only else expected),
        (Kind.RECV_B, nothing if schedule.is_forward_only else expected),
    ):
        found = np.flatnonzero((rows.kind == kind) & (edge != ABSENT))
        slot = edge[found].astype(np.int64) * microbatches + rows.microbatch[found]
        count = np.bincount(slot, minlength=wanted.size).reshape(wanted.shape)
        at_producer = kind in (Kind.SEND_F, Kind.RECV_B)
        for number, microbatch in np.argwhere((count == 0) & wanted):
            stage, peer = ends[number] if at_producer else ends[number][::-1]
            action = Action(kind, int(stage), int(microbatch), int(peer))
            rank = schedule.placement.rank_of_stage[action.stage]
            yield Problem("messages", rank, str(action), "is missing")
        surplus = (count > 1) | ((count > 0) & ~wanted)
        for row in found[surplus.ravel()[slot]][:1]:
            yield at_row(schedule, int(row), "messages", "appears more often than needed")


def _find_untimely(
    schedule: Schedule, lookup: Lookup, ends: NDArray[np.int64]
) -> Iterator[Problem]:
    """Find sends before what they send, and receives after what uses them."""
    opens = schedule.rows.opening_row()
    producer, consumer = ends[:, 0], ends[:, 1]
    for send, made in (
        (lookup.send_forward, lookup.forward[producer]),
        (lookup.send_backward, lookup.backward_input[consumer]),
    ):
        is_wrong = (send != ABSENT) & (made != ABSENT) & (opens[send] <= opens[made])
        for row in np.sort(send[is_wrong]):
            yield at_row(schedule, int(row), "messages", "comes before what it sends is made")
    for receive, user in (
        (lookup.receive_forward, lookup.forward[consumer]),
        (lookup.receive_backward, lookup.backward_input[producer]),
    ):
        is_wrong = (receive != ABSENT) & (user != ABSENT) & (opens[receive] >= opens[user])
        for row in np.sort(receive[is_wrong]):
            yield at_row(schedule, int(row), "messages", "comes after the work that uses it")


def find_stage_problems(schedule: Schedule) -> Iterator[Problem]:
    """Find stages used while sharded, and gradients reduced too early, too often or never."""
    if schedule.rows.has_kind(Kind.UNSHARD, Kind.RESHARD):
        yield from _find_not_whole(schedule)
    if schedule.rows.has_kind(Kind.REDUCE_GRAD):
        yield from _find_reductions(schedule)


def _find_not_whole(schedule: Schedule) -> Iterator[Problem]:
    rows = schedule.rows
    uses = rows.is_compute | rows.is_kind(Kind.RECOMPUTE)
    relevant = np.flatnonzero(rows.is_kind(Kind.UNSHARD, Kind.RESHARD) | uses)
    by_stage = relevant[np.argsort(rows.stage[relevant], kind="stable")]
    kind, stage = rows.kind[by_stage], rows.stage[by_stage]
    change = np.where(kind == Kind.UNSHARD, 1, np.where(kind == Kind.RESHARD, -1, 0))
    begins = np.flatnonzero(np.diff(stage, prepend=-1))
    total = np.cumsum(change)
    before_stage = np.repeat(
        total[begins] - change[begins], np.diff(np.append(begins, len(stage)))
    )
    whole = total - before_stage
    for row in by_stage[(change == 0) & (whole < 1)]:
        yield at_row(schedule, int(row), "parameters", "its stage is not unsharded here")
    for row in by_stage[(change == 1) & (whole > 1)]:
        yield at_row(schedule, int(row), "parameters", "its stage is already unsharded")
    for row in by_stage[(change == -1) & (whole < 0)]:
        yield at_row(schedule, int(row), "parameters", "its stage is not unsharded here")
    lasts = np.append(begins[1:], len(stage)) - 1
    for row in by_stage[lasts[whole[lasts] == 1]]:
        yield at_row(schedule, int(row), "parameters", "its stage is never resharded after this")


def _find_reductions(schedule: Schedule) -> Iterator[Problem]:
    rows = schedule.rows
    reductions = np.flatnonzero(rows.kind == Kind.REDUCE_GRAD)
    count = np.bincount(rows.stage[reductions], minlength=schedule.num_stages)
    backwards = np.flatnonzero(rows.is_kind(Kind.FULL_BACKWARD, Kind.BACKWARD_WEIGHT))
    last = np.full(schedule.num_stages, ABSENT, dtype=np.int64)
    last[rows.stage[backwards]] = backwards
    for stage in np.flatnonzero((count == 0) & (last != ABSENT)):
        action = Action(Kind.REDUCE_GRAD, int(stage))
        rank = schedule.placement.rank_of_stage[stage]
        yield Problem("reduction", rank, str(action), "is missing")
    for row in reductions:
        if count[rows.stage[row]] > 1:
            yield at_row(schedule, int(row), "reduction", "gradients are reduced once per step")
        elif last[rows.stage[row]] == ABSENT:
            yield at_row(schedule, int(row), "reduction", "its stage has no backward")
        elif row < last[rows.stage[row]]:
            message = "comes before the last backward of its stage"
            yield at_row(schedule, int(row), "reduction", message)
