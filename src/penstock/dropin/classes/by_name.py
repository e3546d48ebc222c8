"""Schedule classes by their names."""

from typing import Any

from penstock.dropin.classes.families import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from penstock.dropin.classes.multi import PipelineScheduleMulti
from penstock.dropin.classes.single import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe
from penstock.errors import ScheduleNameError

__all__ = ["get_schedule_class"]

_CLASSES: dict[str, type[Any]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[Any]:
    """Return the class of a schedule by its name, in upper or lower case."""
    by_name = {name.lower(): _CLASSES[name] for name in _CLASSES}
    if schedule_name.lower() not in by_name:
        raise ScheduleNameError(
            f"not a schedule: {schedule_name!r} (expected one of {', '.join(_CLASSES)})"
        )
    return by_name[schedule_name.lower()]
