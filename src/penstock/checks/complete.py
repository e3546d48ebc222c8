"""Every action exactly once, on the right rank, in an order that its own stage allows."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.checks.problem import Problem, at_row
from penstock.ir.actions import Action, Kind
from penstock.ir.lookup import find_rows
from penstock.ir.rows import ABSENT, Bools
from penstock.ir.schedule import Schedule
from penstock.ir.wording import WORDING

__all__ = ["expected_work", "find_incomplete", "find_misplaced"]


def find_misplaced(schedule: Schedule) -> Iterator[Problem]:
    """Find numbers out of range, stages on the wrong rank, and overlaps of non-compute."""
    rows = schedule.rows
    is_known = rows.stage < schedule.num_stages
    for row in np.flatnonzero(~is_known | (rows.stage < 0)):
        yield at_row(
            schedule, int(row), "numbering", f"stages must be from 0 to {schedule.num_stages - 1}"
        )
    counts = (rows.kind <= int(Kind.RECV_B)) | (rows.kind >= int(Kind.RECOMPUTE))
    outside = (rows.microbatch < 0) | (rows.microbatch >= schedule.microbatches)
    for row in np.flatnonzero(counts & outside):
        last = schedule.microbatches - 1
        yield at_row(schedule, int(row), "numbering", f"microbatches must be from 0 to {last}")
    holder = np.array(schedule.placement.rank_of_stage)
    home = holder[np.clip(rows.stage, 0, schedule.num_stages - 1)]
    for row in np.flatnonzero(is_known & (home != rows.rank_of_row())):
        message = WORDING["placement"].format(stage=rows.stage[row], rank=home[row])
        yield at_row(schedule, int(row), "placement", message)
    for row in np.flatnonzero(rows.in_overlap() & ~rows.is_compute):
        # Only columns can hold this; it cannot be shown as works in a neighbourhood.
        rank, position = rows.position(int(row))
        action = str(rows.action(int(row)))
        yield Problem("overlap", rank, action, "only compute can be overlapped", position)


def find_incomplete(schedule: Schedule) -> Iterator[Problem]:
    """Find work that is missing, repeated, contradictory, or too early within its stage."""
    expected = expected_work(schedule)
    yield from _find_uncounted(schedule, Kind.FORWARD, expected)
    if not schedule.is_forward_only:
        yield from _find_backwards(schedule, expected)
    yield from _find_reversed(schedule)


def expected_work(schedule: Schedule) -> Bools:
    """Return, by stage and microbatch, whether that work belongs to the step.

    All of it does, unless the dataflow holds copies of the model: then a microbatch belongs to
    the copy of its first forward in the schedule.
    """
    stream = np.array(schedule.dataflow.stream_of_stage)
    forwards = np.flatnonzero(schedule.rows.is_kind(Kind.FORWARD))[::-1]
    stream_of_microbatch = np.zeros(schedule.microbatches, dtype=np.int64)
    stream_of_microbatch[schedule.rows.microbatch[forwards]] = stream[
        schedule.rows.stage[forwards]
    ]
    result: Bools = stream[:, None] == stream_of_microbatch
    return result


def _count(schedule: Schedule, kind: Kind) -> NDArray[np.int64]:
    """Return, by stage and microbatch, how often the schedule holds this kind."""
    rows = schedule.rows
    found = rows.kind == kind
    slot = rows.stage[found].astype(np.int64) * schedule.microbatches + rows.microbatch[found]
    size = schedule.num_stages * schedule.microbatches
    return np.bincount(slot, minlength=size).reshape(schedule.num_stages, schedule.microbatches)


def _find_uncounted(schedule: Schedule, kind: Kind, expected: Bools) -> Iterator[Problem]:
    count = _count(schedule, kind)
    for stage, microbatch in np.argwhere((count == 0) & expected):
        yield _missing(schedule, Action(kind, int(stage), int(microbatch)), count)
    yield from _surplus(schedule, kind, count, expected)


def _missing(schedule: Schedule, action: Action, count: NDArray[np.int64]) -> Problem:
    is_first = not count[:, 0].any() and action.microbatch == 0
    message = WORDING["missing first" if is_first else "missing"]
    return Problem("once", schedule.placement.rank_of_stage[action.stage], str(action), message)


def _surplus(
    schedule: Schedule, kind: Kind, count: NDArray[np.int64], expected: Bools
) -> Iterator[Problem]:
    for stage, microbatch in np.argwhere((count > 1) | ((count > 0) & ~expected)):
        row = _rows_of(schedule, kind, stage, microbatch)[-1]
        if expected[stage, microbatch]:
            message = WORDING["twice"].format(count=count[stage, microbatch])
        else:
            message = WORDING["other copy"].format(microbatch=microbatch)
        yield at_row(schedule, int(row), "once", message)


def _find_backwards(schedule: Schedule, expected: Bools) -> Iterator[Problem]:
    whole, first, second = (
        _count(schedule, kind)
        for kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    for stage, microbatch in np.argwhere((whole + first + second == 0) & expected):
        action = Action(Kind.FULL_BACKWARD, int(stage), int(microbatch))
        yield _missing(schedule, action, whole + first)
    both = (whole > 0) & (first + second > 0)
    for stage, microbatch in np.argwhere(both):
        row = _rows_of(schedule, Kind.FULL_BACKWARD, stage, microbatch)[-1]
        yield at_row(schedule, int(row), "backward", WORDING["whole and split"])
    for half, other, found, absent in (
        (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, first, second),
        (Kind.BACKWARD_WEIGHT, Kind.BACKWARD_INPUT, second, first),
    ):
        for stage, microbatch in np.argwhere((found > 0) & (absent == 0) & ~both):
            row = _rows_of(schedule, half, stage, microbatch)[-1]
            lost = Action(other, int(stage), int(microbatch))
            message = WORDING["other half"].format(action=lost)
            yield at_row(schedule, int(row), "backward", message)
    for kind, count in (
        (Kind.FULL_BACKWARD, whole),
        (Kind.BACKWARD_INPUT, first),
        (Kind.BACKWARD_WEIGHT, second),
    ):
        yield from _surplus(schedule, kind, count, expected)


def _find_reversed(schedule: Schedule) -> Iterator[Problem]:
    """Find backwards before their forward, and weight halves before their input half."""
    lookup, opens = find_rows(schedule), schedule.rows.opening_row()
    for later, earlier, name in (
        (lookup.backward_input, lookup.forward, "forward"),
        (lookup.backward_weight, lookup.backward_input, "input half"),
    ):
        is_there = (later != ABSENT) & (earlier != ABSENT) & (later != earlier)
        after, before = later[is_there], earlier[is_there]
        for row in np.sort(after[opens[after] <= opens[before]]):
            message = WORDING["order"].format(earlier=name)
            yield at_row(schedule, int(row), "order", message)


def _rows_of(schedule: Schedule, kind: Kind, stage: int, microbatch: int) -> NDArray[np.int64]:
    rows = schedule.rows
    found = (rows.kind == kind) & (rows.stage == stage) & (rows.microbatch == microbatch)
    return np.flatnonzero(found)
