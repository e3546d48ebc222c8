"""A process that saves one step after the other until it is killed at a given point."""

import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

import penstock as ps
from penstock.tools.launcher import WorkerContext

__all__ = ["Point", "fill", "make_pipeline", "save_until_killed"]

# Audited calls on files, and which of their arguments is the path.
_FILE_CALLS = {
    "open": 0,
    "os.mkdir": 0,
    "os.rename": 0,
    "os.rmdir": 0,
    "os.remove": 0,
    "os.scandir": 0,
    "shutil.rmtree": 0,
}


@dataclass(frozen=True)
class Point:
    """A call on files, by number, or a byte in any file, by position."""

    kind: Literal["call", "byte"]
    number: int


def make_pipeline() -> ps.Pipeline:
    """Return a pipeline of four stages of the same size."""
    stages = [nn.Linear(16, 16) for _ in range(4)]
    return ps.Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss())


def fill(pipeline: ps.Pipeline, step: int) -> None:
    """Set every number of the model to the step, so that a mixture would be visible."""
    for tensor in pipeline.state_dict().values():
        tensor.fill_(step)


def save_until_killed(folder: Path, point: Point, context: WorkerContext) -> None:
    """Save, and report which steps are complete; die at the point."""
    pipeline = make_pipeline()
    checkpoints = ps.Checkpoints(folder)
    restored = checkpoints.load(pipeline)
    step = 0 if restored is None else restored.step
    if point.kind == "call":
        _die_at_call(folder, point.number)
    else:
        _die_at_byte(point.number)
    while True:
        step += 1
        fill(pipeline, step)
        checkpoints.save(step, pipeline, wait=True)
        context.report(step)


def _die_at_call(folder: Path, after: int) -> None:
    """Kill this process right before a call on files."""
    calls = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        position = _FILE_CALLS.get(event)
        if position is not None and str(arguments[position]).startswith(str(folder)):
            calls += 1
            if calls > after:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _die_at_byte(number: int) -> None:
    """Let the system kill this process when a file grows beyond this number of bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
