"""The names and module paths of `torch.distributed.pipelining`, on top of Penstock.

Three ways in: import from here; call `install()` before anything imports torch's package; or run a
whole program with `python -m penstock.dropin`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.dropin.installing import install, uninstall
from penstock.missing_torch import torch_needed_by

if TYPE_CHECKING:
    from penstock.dropin.classes.families import (
        ScheduleDualPipeV,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
    )
    from penstock.dropin.classes.single import Schedule1F1B, ScheduleGPipe, _ScheduleForwardOnly
    from penstock.dropin.pipe.marking import pipe_split
    from penstock.dropin.pipe.pipe import Pipe, SplitPoint, pipeline
    from penstock.dropin.stages.own_stage import PipelineStage
    from penstock.dropin.stages.traced_stage import build_stage

# Loaded when first asked for: `python -m penstock.dropin` starts many processes that want none.
_HOMES = {
    "Pipe": "_IR",
    "PipelineStage": "stage",
    "Schedule1F1B": "schedules",
    "ScheduleDualPipeV": "schedules",
    "ScheduleGPipe": "schedules",
    "ScheduleInterleaved1F1B": "schedules",
    "ScheduleInterleavedZeroBubble": "schedules",
    "ScheduleLoopedBFS": "schedules",
    "ScheduleZBVZeroBubble": "schedules",
    "SplitPoint": "_IR",
    "_ScheduleForwardOnly": "schedules",
    "build_stage": "stage",
    "pipe_split": "_IR",
    "pipeline": "_IR",
}
_SUBMODULES = frozenset(
    {
        "_IR",
        "_backward",
        "_debug",
        "_schedule_visualizer",
        "_unflatten",
        "_utils",
        "microbatch",
        "schedules",
        "stage",
    }
)

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_ScheduleForwardOnly",
    "build_stage",
    "install",
    "pipe_split",
    "pipeline",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    with torch_needed_by(f"{__name__}.{name}"):
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
