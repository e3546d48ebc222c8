"""Candidates side by side: their steps take turns in the same processes, which is fair to all.

round 0   plan    1F1B    GPipe
round 1   1F1B    GPipe   plan         the first one changes from round to round
round 2   GPipe   plan    1F1B
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from penstock.sim.timeline import Timeline
from penstock.tools.demo.candidates import DemoCandidate
from penstock.tools.demo.rank import LONGEST_SILENCE, count_held_bytes, make_pipeline
from penstock.tools.demo.task import Task, choose_device, draw_batches
from penstock.tools.demo.text import TextBatch
from penstock.tools.launcher import Report, run_on_ranks
from penstock.training.pipeline import Pipeline

__all__ = ["Result", "compare_candidates"]

# How many steps are recorded, of which the median one is kept.
_RECORDED = 3


@dataclass(frozen=True)
class Result:
    """The seconds of a candidate's steps, the bytes that each rank held, and a recorded step."""

    candidate: DemoCandidate
    seconds: tuple[float, ...]
    held: tuple[float, ...]
    recorded: Timeline

    @property
    def typical(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range of the seconds, as a share of the median."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(high - low) / self.typical


@dataclass(frozen=True, slots=True)
class _Measured:
    """What one rank measured of a candidate."""

    seconds: tuple[float, ...]
    held: float
    recorded: Timeline


def compare_candidates(
    task: Task,
    candidates: Sequence[DemoCandidate],
    *,
    rounds: int,
    on_round: Callable[[int], None] = lambda _done: None,
) -> list[Result]:
    """Run steps of all candidates in turns; `on_round` gets the number of rounds done."""
    measured: list[list[_Measured]] = run_on_ranks(
        partial(_run_rounds, task, tuple(candidates), rounds),
        task.ranks,
        seconds=LONGEST_SILENCE,
        on_report=lambda _rank, done: on_round(done),
    )
    return [
        Result(
            candidate, first.seconds, (first.held, *(one.held for one in others)), first.recorded
        )
        for candidate, first, *others in zip(candidates, *measured, strict=True)
    ]


def _run_rounds(
    task: Task, candidates: tuple[DemoCandidate, ...], rounds: int, report: Report
) -> list[_Measured]:
    device = choose_device(task, dist.get_rank())
    batch = next(draw_batches(task, device))
    pipelines = {candidate.name: make_pipeline(task, candidate) for candidate in candidates}
    held = {name: count_held_bytes(task, found) for name, found in pipelines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(rounds):
        for name, taken in _run_round(number, pipelines, batch, device).items():
            seconds[name].append(taken)
        if dist.get_rank() == 0:
            report(number + 1)
    return [
        _Measured(tuple(seconds[name]), held[name], _record(pipeline, batch))
        for name, pipeline in pipelines.items()
    ]


def _run_round(
    number: int, pipelines: Mapping[str, Pipeline], batch: TextBatch, device: torch.device
) -> dict[str, float]:
    """Return the seconds of one step of each candidate."""
    names = list(pipelines)
    first = number % len(names)
    seconds = {}
    for name in names[first:] + names[:first]:
        dist.barrier()
        begin = perf_counter()
        pipelines[name].step(batch.tokens, target=batch.target)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[name] = perf_counter() - begin
    return seconds


def _record(pipeline: Pipeline, batch: TextBatch) -> Timeline:
    """Return the median one of some recorded steps."""
    results = [
        pipeline.step(batch.tokens, target=batch.target, record=True) for _ in range(_RECORDED)
    ]
    timelines = [result.timeline for result in results if result.timeline is not None]
    return sorted(timelines, key=lambda timeline: timeline.end_time)[_RECORDED // 2]
