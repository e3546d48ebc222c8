"""The names and module paths of `torch.distributed.pipelining`, on top of Penstock.

Three ways in: import from here; call `install()` before anything imports torch's package; or run a
whole program with `python -m penstock.dropin`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.dropin.installing import install, uninstall
from penstock.missing_torch import torch_needed_by

if TYPE_CHECKING:
    from penstock.dropin.classes.families import (
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
        _ScheduleForwardOnly,
    )
    from penstock.dropin.pipe.marking import pipe_split
    from penstock.dropin.pipe.pipe import Pipe, SplitPoint, pipeline
    from penstock.dropin.stages.kinds import PipelineStage, build_stage

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
    # Loaded when first asked for: `python -m penstock.dropin` starts processes that want none.
    with torch_needed_by(f"{__name__}.{name}"):
        if name in __all__:
            homes = (import_module(f"{__name__}.{home}") for home in ("stage", "schedules", "_IR"))
            return next(getattr(home, name) for home in homes if hasattr(home, name))
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
