"""One timeline from what each rank recorded, the same on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import TypeAlias

import numpy as np

from penstock.ir.lookup import find_rows
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.ranks.control import Control
from penstock.sim.timeline import Timeline
from penstock.step.step_data import StepRecording

__all__ = ["join_recordings"]

_Wait: TypeAlias = tuple[bool, int, int, float, float]


def join_recordings(control: Control, schedule: Schedule, mine: StepRecording) -> Timeline:
    """Return the timeline of a recorded step.

    Processes of one machine have the same clock. Those of different machines began to count when
    they had agreed on the step.
    """
    everyone = [StepRecording(*columns) for columns in control.gather(astuple(mine))]
    start, end, memory = (np.zeros(len(schedule.rows)) for _ in range(3))
    waits: list[_Wait] = []
    arrivals: dict[tuple[bool, int, int], float] = {}
    for one, late in zip(everyone, _find_lateness(everyone), strict=True):
        start[one.row], end[one.row] = late + np.array(one.start), late + np.array(one.end)
        memory[one.row] = one.memory
        for is_forward, edge, microbatch, wait, there in one.waits:
            waits.append((is_forward, edge, microbatch, late + wait, late + there))
        for is_forward, edge, microbatch, arrival in one.arrivals:
            arrivals[is_forward, edge, microbatch] = late + arrival
    _end_receives(schedule, waits, arrivals, start, end)
    begin = start.min()
    return Timeline(schedule, start - begin, end - begin, memory)


def _find_lateness(everyone: Sequence[StepRecording]) -> list[float]:
    """Return how much later each process began to count than the first one of its machine."""
    first: dict[str, float] = {}
    for one in everyone:
        first[one.machine] = min(first.get(one.machine, one.began), one.began)
    return [one.began - first[one.machine] if one.machine else 0.0 for one in everyone]


def _end_receives(
    schedule: Schedule,
    waits: Sequence[_Wait],
    arrivals: Mapping[tuple[bool, int, int], float],
    start: Floats,
    end: Floats,
) -> None:
    """End each receive when its message was there, at the latest when it was used.

    A message that a rank has waited for was there when the wait ended. Of others the sender may
    know when they arrived. A receive that begins later than that takes no time.
    """
    lookup = find_rows(schedule)
    for is_forward, edge, microbatch, begin, there in waits:
        table = lookup.receive_forward if is_forward else lookup.receive_backward
        row = table[edge, microbatch]
        arrival = arrivals.get((is_forward, edge, microbatch), there)
        end[row] = there if arrival > begin else max(float(start[row]), arrival)
