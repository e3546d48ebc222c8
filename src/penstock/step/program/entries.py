"""Rows of a schedule bound to their calls; overlapped rows become one entry."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.alive.progress_log import Note
from penstock.ir.actions import Action
from penstock.ir.clock import run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.rows import Bools
from penstock.ir.schedule import Schedule
from penstock.ranks.transport import Message

__all__ = ["BoundRow", "join_overlapped", "order_for_one_process"]


@dataclass(frozen=True, slots=True, eq=False)
class BoundRow:
    """A row with its call, and the messages from other ranks that the call uses up.

    Overlapped rows are one entry with `members`; its other fields are those of the first.
    """

    row: int
    action: Action
    note: Note
    call: Callable[[], None]
    takes: list[Message]
    members: tuple["BoundRow", ...] = ()


def order_for_one_process(schedule: Schedule) -> list[int]:
    """Return all rows in an order in which one thread can run every rank."""
    graph = build_graph(schedule)
    ones, zeros = np.ones(len(schedule.rows)), np.zeros(len(graph.need))
    run = run_in_order(schedule.rows, graph, duration=ones, busy=ones, lag=zeros)
    order: list[int] = np.lexsort((np.arange(len(ones)), run.start)).tolist()
    return order


def join_overlapped(
    entries: Iterable[BoundRow], joined: Bools, join: Callable[[Sequence[BoundRow]], BoundRow]
) -> Iterator[BoundRow]:
    """Yield entries, with one that `join` makes in place of those of overlapped rows."""
    group: list[BoundRow] = []
    for entry in entries:
        if group and not joined[entry.row]:
            yield group[0] if len(group) == 1 else join(group)
            group = []
        group.append(entry)
    if group:
        yield group[0] if len(group) == 1 else join(group)
