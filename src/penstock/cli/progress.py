"""Training as it goes on: a live bar in a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from penstock.examples.language import Lesson, Step

__all__ = ["Display", "show_steps"]

# In a log, so many lines per training.
_LOG_LINES = 6


@dataclass(slots=True)
class Display:
    """Takes every step, shows it and keeps it."""

    draw: Callable[[Step], None]
    steps: list[Step] = field(default_factory=list)

    def show(self, step: Step) -> None:
        """Take one more step."""
        self.steps.append(step)
        self.draw(step)


@contextmanager
def show_steps(console: Console, name: str, lesson: Lesson) -> Iterator[Display]:
    """Show the steps of one training while it runs."""
    if not console.is_terminal:
        yield Display(_line_drawer(console, name, lesson))
        return
    with _make_progress(console) as progress:
        yield Display(_bar_drawer(progress, name, lesson))


def _make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _bar_drawer(progress: Progress, name: str, lesson: Lesson) -> Callable[[Step], None]:
    task = progress.add_task(name, total=lesson.steps, numbers="starting")

    def draw(step: Step) -> None:
        progress.update(task, completed=step.number, numbers=_numbers(step, lesson))

    return draw


def _line_drawer(console: Console, name: str, lesson: Lesson) -> Callable[[Step], None]:
    every = max(1, lesson.steps // _LOG_LINES)

    def draw(step: Step) -> None:
        if step.number % every == 0 or step.number in (1, lesson.steps):
            console.print(f"{name} step {step.number}/{lesson.steps}: {_numbers(step, lesson)}")

    return draw


def _numbers(step: Step, lesson: Lesson) -> str:
    return f"loss {step.loss:.4f}, {lesson.tokens_per_step / step.seconds:,.0f} letters/s"
