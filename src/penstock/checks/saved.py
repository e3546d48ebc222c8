"""The rules for what becomes of what forwards save: recomputed, or offloaded and reloaded."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.checks.problem import Problem, at_row
from penstock.ir.actions import MEMORY_KINDS, Action, Kind
from penstock.ir.lookup import find_memory_rows, find_rows
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule
from penstock.ir.wording import WORDING

__all__ = ["find_memory_problems"]

# Each half of a pair, and the other one.
_PAIRS = ((Kind.OFFLOAD, Kind.RELOAD), (Kind.RELOAD, Kind.OFFLOAD))


def find_memory_problems(schedule: Schedule) -> Iterator[Problem]:
    """Find what is recomputed or offloaded twice, without need, in part, or at the wrong time."""
    if not schedule.rows.has_memory_actions:
        return
    yield from _find_repeated(schedule)
    tables = find_memory_rows(schedule)
    lookup = find_rows(schedule)
    for kind in MEMORY_KINDS:
        table = tables[kind]
        for row in np.sort(table[(table != ABSENT) & (lookup.backward_input == ABSENT)]):
            message = "no backward of its stage and microbatch follows; remove it"
            yield at_row(schedule, int(row), "memory", message)
    for kind, other in _PAIRS:
        alone = (tables[kind] != ABSENT) & (tables[other] == ABSENT)
        for stage, microbatch in np.argwhere(alone):
            lost = Action(other, int(stage), int(microbatch))
            message = WORDING["other half"].format(action=lost)
            yield at_row(schedule, int(tables[kind][stage, microbatch]), "memory", message)
    both = (tables[Kind.RECOMPUTE] != ABSENT) & (tables[Kind.OFFLOAD] != ABSENT)
    for row in np.sort(tables[Kind.OFFLOAD][both]):
        message = (
            "its forward saves only its inputs, because a RECOMPUTE runs it again; keep the "
            "RECOMPUTE, or OFFLOAD and RELOAD"
        )
        yield at_row(schedule, int(row), "memory", message)
    yield from _find_reversed(
        schedule,
        [
            (tables[Kind.RECOMPUTE], lookup.forward, "forward"),
            (tables[Kind.OFFLOAD], lookup.forward, "forward"),
            (tables[Kind.RELOAD], tables[Kind.OFFLOAD], "OFFLOAD"),
            (lookup.backward_input, tables[Kind.RECOMPUTE], "RECOMPUTE"),
            (lookup.backward_input, tables[Kind.RELOAD], "RELOAD"),
        ],
    )


def _find_repeated(schedule: Schedule) -> Iterator[Problem]:
    rows = schedule.rows
    size = schedule.num_stages * schedule.microbatches
    for kind in MEMORY_KINDS:
        found = np.flatnonzero(rows.kind == kind)
        slot = rows.stage[found].astype(np.int64) * schedule.microbatches + rows.microbatch[found]
        count = np.bincount(slot, minlength=size)
        last = np.zeros(size, dtype=np.int64)
        last[slot] = found
        for repeated in np.flatnonzero(count > 1):
            message = WORDING["twice"].format(count=count[repeated])
            yield at_row(schedule, int(last[repeated]), "memory", message)


def _find_reversed(
    schedule: Schedule, pairs: list[tuple[NDArray[np.int32], NDArray[np.int32], str]]
) -> Iterator[Problem]:
    """Find actions that come before what they need, or together with it in an overlap."""
    opens = schedule.rows.opening_row()
    for later, earlier, name in pairs:
        is_there = (later != ABSENT) & (earlier != ABSENT)
        after, before = later[is_there], earlier[is_there]
        for row in np.sort(after[opens[after] <= opens[before]]):
            message = WORDING["order"].format(earlier=name)
            yield at_row(schedule, int(row), "order", message)
