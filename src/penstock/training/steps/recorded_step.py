"""One timeline from what each rank recorded, the same on every rank."""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.ir.lookup import find_rows
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.ranks.control import Control
from penstock.sim.timeline import Timeline
from penstock.step.step_data import StepRecording

__all__ = ["join_recordings"]


def join_recordings(control: Control, schedule: Schedule, mine: StepRecording) -> Timeline:
    """Return the timeline of a recorded step; the ranks' clocks started when they agreed on it."""
    everyone = control.gather(
        [mine.row, mine.start, mine.end, mine.memory, mine.waits, mine.arrivals]
    )
    start, end, memory = (np.zeros(len(schedule.rows)) for _ in range(3))
    for rows, starts, ends, held, _, _ in everyone:
        start[rows], end[rows], memory[rows] = starts, ends, held
    waits = [tuple(wait) for recorded in everyone for wait in recorded[4]]
    arrivals = {tuple(name): at for recorded in everyone for *name, at in recorded[5]}
    _end_receives(schedule, waits, arrivals, start, end)
    begin = start.min()
    return Timeline(schedule, start - begin, end - begin, memory)


def _end_receives(
    schedule: Schedule,
    waits: Sequence[tuple[bool, int, int, float, float]],
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
