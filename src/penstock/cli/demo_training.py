"""The part of the demo that trains: progress, the same losses unsplit, what really happened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.cli.progress import show_steps
from penstock.cli.reports import picture, title, write_figure
from penstock.errors import PipelineError
from penstock.sim.engine import simulate
from penstock.sim.measured import costs_of
from penstock.sim.timeline import Timeline
from penstock.view.terminal import summary_table

if TYPE_CHECKING:
    from penstock.examples.language import Lesson, Step

__all__ = ["Wish", "plan_training", "train_and_show"]

# Losses in float32 that are further apart than this are not those of the same model.
_MOST_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asks the demo to train: by which schedule, where and for how long."""

    schedule: str
    ranks: int
    steps: int
    device: str


def plan_training(wish: Wish) -> Lesson:
    """What will be trained, or an error that says what would work."""
    from penstock.examples.language import plan_lesson

    return plan_lesson(wish.schedule, ranks=wish.ranks, steps=wish.steps, device=wish.device)


def train_and_show(console: Console, output: Path, lesson: Lesson) -> None:
    """Train as a pipeline and unsplit, compare the losses, and draw the last step."""
    steps, timeline = _train(console, lesson)
    _compare_losses(console, lesson, steps)
    _draw_last_step(console, output, timeline)


def _train(console: Console, lesson: Lesson) -> tuple[list[Step], Timeline]:
    from penstock.examples.language import train_pipeline

    schedule = lesson.schedule
    title(console, f"Run: a small GPT learns a text over {schedule.num_ranks} processes")
    console.print(
        f"{schedule.name}: {lesson.layers} layers in {schedule.num_stages} stages, "
        f"{schedule.microbatches} microbatches, {lesson.tokens_per_step} letters a step"
    )
    with show_steps(console, "pipeline", lesson) as display:
        timeline = train_pipeline(lesson, display.show)
    return display.steps, timeline


def _compare_losses(console: Console, lesson: Lesson, steps: list[Step]) -> None:
    from penstock.examples.language import train_unsplit

    title(console, "Exact: the unsplit model, on the same data, in one process")
    with show_steps(console, "unsplit", lesson) as display:
        train_unsplit(lesson, display.show)
    pairs = zip(steps, display.steps, strict=True)
    difference = max(abs(piped.loss - alone.loss) for piped, alone in pairs)
    console.print(
        f"loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f} as a pipeline, "
        f"{display.steps[0].loss:.4f} -> {display.steps[-1].loss:.4f} unsplit; "
        f"largest difference in {len(steps)} steps: {difference:.1e}"
    )
    if not difference <= _MOST_DIFFERENCE:
        raise PipelineError(
            f"the losses differ from the unsplit model's by {difference:.1e}, more than "
            f"rounding in float32 explains ({_MOST_DIFFERENCE:g})"
        )


def _draw_last_step(console: Console, output: Path, recorded: Timeline) -> None:
    title(console, "See: the last step as it was recorded, and as it was simulated")
    # The schedule as it ran, with its sends, priced with what its own actions took.
    simulated = simulate(recorded.schedule, costs_of(recorded))
    timelines = {"recorded": recorded, "simulated": simulated}
    for name, timeline in timelines.items():
        console.print(f"{name}, in seconds:")
        console.print(picture(console, timeline))
    console.print(summary_table(timelines))
    write_figure(console, timelines, output / "training.png")
