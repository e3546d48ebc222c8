"""Dry runs of an order in slots of one action each, and what they look like."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from penstock.atomic_files import write_atomically
from penstock.dropin.names.actions import _Action
from penstock.dropin.names.lists import Order, fill_slots, to_schedule
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.clock import Run, find_cycle, run_in_order
from penstock.ir.graph import NeedList, build_graph, join_needs
from penstock.ir.lookup import find_rows
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule

__all__ = ["_dump_chrometrace", "_format_pipeline_order", "_simulate_comms_compute"]


def _simulate_comms_compute(
    pipeline_order: Mapping[int, Sequence[_Action | None]],
    stage_to_rank: Callable[[int], int],
    num_stages: int,
) -> Order:
    """Run an order in slots: every action takes one, and a rank that waits has an idle slot.

    A message can be received in the slot in which it is sent. An order that never finishes is a
    `DeadlockError`, which is a `ValueError`.
    """
    order = {rank: [a for a in slots if a is not None] for rank, slots in pipeline_order.items()}
    schedule = to_schedule(order, stage_to_rank, num_stages)
    rows = schedule.rows
    graph = join_needs(len(rows), _receives_wait(schedule), build_graph(schedule))
    crosses = (graph.link >= 0) & schedule.has_communication
    ones, lag = np.ones(len(rows)), np.where(crosses, -1.0, 0.0)
    run = run_in_order(rows, graph, duration=ones, busy=ones, lag=lag)
    if not run.is_finished:
        raise DeadlockError(f"the order never finishes; {_describe_waits(schedule, run)}")
    return fill_slots(schedule, run.start, order)


def _receives_wait(schedule: Schedule) -> list[NeedList]:
    """Let each receive wait for its send."""
    lookup, rank, ranks = find_rows(schedule), schedule.rows.rank_of_row(), schedule.num_ranks
    lists = []
    for receives, sends in (
        (lookup.receive_forward, lookup.send_forward),
        (lookup.receive_backward, lookup.send_backward),
    ):
        receive, send = receives[receives != ABSENT], sends[receives != ABSENT]
        if (lonely := receive[send == ABSENT]).size:
            at, position = schedule.rows.position(int(lonely[0]))
            raise ScheduleError(
                f"rank {at}, position {position}, {schedule.rows.action(int(lonely[0]))}: "
                "nobody sends what it receives"
            )
        lists.append(NeedList(receive, send, rank[send] * ranks + rank[receive]))
    return lists


def _describe_waits(schedule: Schedule, run: Run) -> str:
    """Describe the ranks that wait for one another in a circle."""
    rows = schedule.rows
    waits = ((int(run.stuck_at[rank]), int(run.waits_for[rank])) for rank in find_cycle(rows, run))
    return ", ".join(
        f"{rows.action(stuck)} waits for {rows.action(need)}" for stuck, need in waits
    )


def _format_pipeline_order(
    pipeline_order: Mapping[int, Sequence[_Action | None]], error_step_number: int | None = None
) -> str:
    """Return a table with ranks across and steps down; the step of an error is marked."""
    columns = [
        [f"Rank {place}", *("" if action is None else str(action) for action in slots)]
        for place, (_, slots) in enumerate(sorted(pipeline_order.items()))
    ]
    steps = range(max(map(len, columns)) - 1)
    digits = len(str(len(steps) - 1))
    labels = [f"Step {step:0{digits}}: " for step in steps]
    least = len("Step ") + digits
    widths = [max(least, *map(len, column)) for column in columns]
    head, *rows = (
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip_longest(*columns, fillvalue="")
    )
    marks = [" <-- ERROR HERE" if step == error_step_number else "" for step in steps]
    lines = [label + row + mark for label, row, mark in zip(labels, rows, marks, strict=True)]
    return "\n".join([" " * (least + len(": ")) + head, *lines]) + "\n"


def _dump_chrometrace(
    schedule: Mapping[int, Sequence[_Action | None]], filename: Path | str
) -> None:
    """Write slots as a trace that Chrome and Perfetto open, a microsecond per slot."""
    events = [
        {
            "name": str(action),
            "cat": "computation" if action.is_compute_op else "communication",
            "ph": "X",
            "pid": rank,
            "tid": rank,
            "ts": slot,
            "dur": 1,
        }
        for rank in sorted(schedule)
        for slot, action in enumerate(schedule[rank])
        if action is not None
    ]
    write_atomically(filename, json.dumps({"traceEvents": events}))
