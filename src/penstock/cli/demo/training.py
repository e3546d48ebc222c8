"""The training of the demo, checked against the unsplit model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.cli.reports import title
from penstock.cli.waiting.progress import Display, show_training, sparkline
from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.tools.demo.candidates import DemoCandidate
    from penstock.tools.demo.task import Task

__all__ = ["Training", "train_and_compare"]

# Losses in float32 that differ by more are not explained by rounding.
_MAX_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class Training:
    """The first and last loss of a training, and the largest difference to the unsplit model."""

    first_loss: float
    last_loss: float
    difference: float


def train_and_compare(console: Console, task: Task, candidate: DemoCandidate) -> Training:
    """Train as a pipeline and unsplit on the same data, and compare every loss."""
    piped = _train(console, task, candidate)
    unsplit = _train_unsplit(console, task)
    pairs = list(zip(piped.steps, unsplit.steps, strict=True))
    difference = max(abs(one.loss - other.loss) for one, other in pairs)
    for name, display in {"pipeline": piped, "unsplit": unsplit}.items():
        losses = [step.loss for step in display.steps]
        line = "" if console.options.ascii_only else sparkline(losses)
        console.print(f"{name:>8} {line} {losses[0]:.4f} -> {losses[-1]:.4f}")
    console.print(
        f"largest difference in {len(pairs)} steps: {difference:.1e} "
        f"(float32; up to {_MAX_DIFFERENCE:g} counts as rounding)"
    )
    if not difference <= _MAX_DIFFERENCE:
        raise PipelineError(
            f"losses must be within {_MAX_DIFFERENCE:g} of the unsplit model's, which is what "
            f"rounding in float32 explains (got a difference of {difference:.1e})"
        )
    return Training(piped.steps[0].loss, piped.steps[-1].loss, difference)


def _train(console: Console, task: Task, candidate: DemoCandidate) -> Display:
    from penstock.tools.demo.training import train_pipeline

    schedule = candidate.schedule
    title(console, f"Train: {candidate.name} in {task.ranks} processes, on a text")
    console.print(
        f"{len(task.pieces)} pieces in {schedule.num_stages} stages, {schedule.microbatches} "
        f"microbatches, {task.tokens_per_step} tokens a step"
    )
    with show_training(console, "pipeline", task) as display:
        train_pipeline(task, candidate, display.show)
    return display


def _train_unsplit(console: Console, task: Task) -> Display:
    from penstock.tools.demo.training import train_unsplit

    title(console, "Verify: the unsplit model, on the same data, in one process")
    with show_training(console, "unsplit", task) as display:
        train_unsplit(task, display.show)
    return display
