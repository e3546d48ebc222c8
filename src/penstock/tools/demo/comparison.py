"""Candidates side by side: in the same processes their steps take turns, so that none is favoured.

round 0   plan    1F1B    GPipe
round 1   1F1B    GPipe   plan         who comes first changes from round to round
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

# Of these recorded steps the middle one is kept.
_RECORDED = 3


@dataclass(frozen=True)
class Result:
    """How a candidate went: seconds of its steps, bytes that each rank held, a recorded step."""

    candidate: DemoCandidate
    seconds: tuple[float, ...]
    held: tuple[float, ...]
    recorded: Timeline

    @property
    def typical(self) -> float:
        """The median of its seconds."""
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """How far the middle half of its seconds lies apart, as a share of the median."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(high - low) / self.typical


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank saw of a candidate."""

    seconds: tuple[float, ...]
    held: float
    recorded: Timeline


def compare_candidates(
    task: Task,
    candidates: Sequence[DemoCandidate],
    *,
    rounds: int,
    tell: Callable[[int], None] = lambda _done: None,
) -> list[Result]:
    """Run steps of every candidate in turns; after every round, how many are done is told."""
    seen: list[list[_Seen]] = run_on_ranks(
        partial(_compete, task, tuple(candidates), rounds),
        task.ranks,
        seconds=LONGEST_SILENCE,
        on_report=lambda _rank, done: tell(done),
    )
    return [
        Result(
            candidate, first.seconds, (first.held, *(one.held for one in others)), first.recorded
        )
        for candidate, first, *others in zip(candidates, *seen, strict=True)
    ]


def _compete(
    task: Task, candidates: tuple[DemoCandidate, ...], rounds: int, report: Report
) -> list[_Seen]:
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
        _Seen(tuple(seconds[name]), held[name], _record(pipeline, batch))
        for name, pipeline in pipelines.items()
    ]


def _run_round(
    number: int, pipelines: Mapping[str, Pipeline], batch: TextBatch, device: torch.device
) -> dict[str, float]:
    """The seconds of one step of each."""
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
    """The middle one of some recorded steps."""
    results = [
        pipeline.step(batch.tokens, target=batch.target, record=True) for _ in range(_RECORDED)
    ]
    timelines = [result.timeline for result in results if result.timeline is not None]
    return sorted(timelines, key=lambda timeline: timeline.end_time)[_RECORDED // 2]
