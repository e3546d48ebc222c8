"""Sharded parameters: gathered before a stage is used, freed when others need the room.

limit 1   0UNSHARD 0F0 0RESHARD 4UNSHARD 4F0 4B0 4RESHARD 0UNSHARD 0B0 0RESHARD
limit 2   0UNSHARD 4UNSHARD 0F0 4F0 4B0 4RESHARD 0B0 0RESHARD
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SizeError
from penstock.ir.actions import Kind
from penstock.ir.rows import insert_rows
from penstock.ir.schedule import Schedule
from penstock.passes.stage_actions import end_of_work, stage_rows

__all__ = ["add_unshard_reshard"]

# The rows to insert before, and the kind and stage of each new action.
Placed: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int64]]


# The stages of a rank that are whole at once, unless an overlap needs more.
_WHOLE_STAGES = 3


def add_unshard_reshard(schedule: Schedule, *, whole_stages: int | None = None) -> Schedule:
    """Gather the stages that a rank will use next, and free those it will not use soon.

    At most `whole_stages` stages of a rank are whole at once. An overlap needs all its stages at
    once, so a limit below that is an error. Without a limit of yours it is three, or as many as
    an overlap needs.
    """
    if whole_stages is None:
        whole_stages = max(_WHOLE_STAGES, _most_in_an_overlap(schedule))
    if whole_stages < 1:
        raise SizeError(f"whole_stages must be at least 1 (whole_stages: {whole_stages})")
    stages_per_rank = np.bincount(schedule.placement.rank_of_stage)
    place = _place_once if stages_per_rank.max() <= whole_stages else _place_in_turns
    before, kind, stage = place(schedule, whole_stages)
    new = stage_rows(schedule, kind, stage)
    return replace(schedule, rows=insert_rows(schedule.rows, before, new))


def _most_in_an_overlap(schedule: Schedule) -> int:
    rows = schedule.rows
    if not rows.joined.any():
        return 1
    opens = rows.opening_row()
    _, stages = np.unique(np.unique(np.stack((opens, rows.stage)), axis=1)[0], return_counts=True)
    return int(stages.max())


def _place_once(schedule: Schedule, _: int) -> Placed:
    """Gather all stages at the start of their rank, and free each after its last use."""
    rows = schedule.rows
    # A batch with fewer microbatches may leave a copy of a stage without work.
    each = np.unique(rows.stage).astype(np.int64)
    first_use = np.empty(schedule.num_stages, dtype=np.int64)
    first_use[rows.stage[::-1]] = np.arange(len(rows))[::-1]
    last_use = np.empty(schedule.num_stages, dtype=np.int64)
    last_use[rows.stage] = np.arange(len(rows))
    holder = np.array(schedule.placement.rank_of_stage)[each]
    before = np.concatenate((rows.first[holder], end_of_work(rows, last_use[each])))
    kind = np.repeat(np.array([Kind.UNSHARD, Kind.RESHARD], dtype=np.int8), len(each))
    order = np.lexsort((np.tile(first_use[each], 2), before, np.tile(holder, 2)))
    return before[order], kind[order], np.tile(each, 2)[order]


def _place_in_turns(schedule: Schedule, limit: int) -> Placed:
    """Follow each rank's order, and gather as many stages ahead as the limit allows."""
    rows = schedule.rows
    moves: list[tuple[int, Kind, int]] = []
    for rank in range(schedule.num_ranks):
        begin, end = int(rows.first[rank]), int(rows.first[rank + 1])
        uses = _uses(rows.stage[begin:end].tolist(), rows.joined[begin:end].tolist())
        moves += _moves([(begin + place, stages) for place, stages in uses], end, limit)
    row, kind, stage = (np.array(column) for column in zip(*moves, strict=True))
    return row, kind.astype(np.int8), stage


def _uses(stages: Sequence[int], joined: Sequence[bool]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the stages that each piece of work uses, with its first row; repeats are left out."""
    uses: list[tuple[int, tuple[int, ...]]] = []
    for row, (stage, is_joined) in enumerate(zip(stages, joined, strict=True)):
        if is_joined:
            place, members = uses.pop()
            uses.append((place, members if stage in members else (*members, stage)))
        else:
            uses.append((row, (stage,)))
    return [
        use
        for use, last in zip(uses, [None, *uses], strict=False)
        if not last or use[1] != last[1]
    ]


def _moves(
    uses: Sequence[tuple[int, tuple[int, ...]]], end: int, limit: int
) -> Iterator[tuple[int, Kind, int]]:
    """Yield RESHARD and UNSHARD before the uses that need them, and the last RESHARDs."""
    whole: list[int] = []
    for (row, stages), wanted in zip(uses, _next_stages(uses, limit), strict=True):
        if len(stages) > limit:
            raise SizeError(
                f"an overlap uses {len(stages)} stages at once (whole_stages: {limit}); "
                f"use whole_stages={len(stages)} or more"
            )
        yield from ((row, Kind.RESHARD, stage) for stage in whole if stage not in wanted)
        yield from ((row, Kind.UNSHARD, stage) for stage in wanted if stage not in whole)
        whole = [stage for stage in whole if stage in wanted] + [
            stage for stage in wanted if stage not in whole
        ]
    yield from ((end, Kind.RESHARD, stage) for stage in whole)


def _next_stages(uses: Sequence[tuple[int, tuple[int, ...]]], limit: int) -> list[tuple[int, ...]]:
    """Return, for each use, the next `limit` different stages from there on, in order of use."""
    upcoming: tuple[int, ...] = ()
    result = []
    for _, stages in reversed(uses):
        later = tuple(stage for stage in upcoming if stage not in stages)
        upcoming = (*stages, *later)
        result.append(upcoming[:limit])
    return result[::-1]
