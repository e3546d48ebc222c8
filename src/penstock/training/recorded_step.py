"""One timeline from what each rank recorded, the same on every rank."""

import numpy as np

from penstock.ir.schedule import Schedule
from penstock.ranks.control import Control
from penstock.sim.timeline import Timeline
from penstock.step.step_data import StepRecording

__all__ = ["join_recordings"]


def join_recordings(control: Control, schedule: Schedule, mine: StepRecording) -> Timeline:
    """Return the timeline of a recorded step; the ranks' clocks started when they agreed on it."""
    everyone = control.gather([mine.row, mine.start, mine.end, mine.memory])
    start, end, memory = (np.zeros(len(schedule.rows)) for _ in range(3))
    for rows, starts, ends, held in everyone:
        start[rows], end[rows], memory[rows] = starts, ends, held
    begin = start.min()
    return Timeline(schedule, start - begin, end - begin, memory)
