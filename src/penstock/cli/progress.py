"""Work as it goes on: live figures in a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.view.units import format_bytes, format_share

if TYPE_CHECKING:
    from penstock.tools.demo.task import Task
    from penstock.tools.demo.training import TrainedStep, TrainingReport

__all__ = ["Display", "show_busy", "show_rounds", "show_training", "sparkline"]

# In a log, so many lines per training.
_LOG_LINES = 6
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40


def sparkline(values: Sequence[float], *, width: int = _SPARKLINE_WIDTH) -> str:
    """Numbers as a line of bars, the lowest to the highest; means, where there are too many.

    >>> sparkline([8, 4, 2, 1], width=4)
    '█▄▂▁'
    """
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    height = float(np.ptp(means)) or 1.0
    levels = np.rint((means - means.min()) / height * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[level] for level in levels)


@dataclass(slots=True)
class Display:
    """Takes all that is heard of a training, keeps it, and shows it by `draw`."""

    task: Task
    draw: Callable[[Display], None]
    steps: list[TrainedStep] = field(default_factory=list)
    held: dict[int, float] = field(default_factory=dict)

    def show(self, news: TrainingReport) -> None:
        """Take one more step, or what a rank holds."""
        from penstock.tools.demo.training import HeldBytes

        if isinstance(news, HeldBytes):
            self.held[news.rank] = news.bytes
        else:
            self.steps.append(news)
        self.draw(self)

    @property
    def speed(self) -> str:
        """How many tokens a second the last step saw."""
        return f"{self.task.tokens_per_step / self.steps[-1].seconds:,.0f} tokens/s"

    @property
    def memory(self) -> str:
        """What every rank that has told holds at most."""
        ranks = sorted(self.held.items())
        return ", ".join(f"rank {rank} {format_bytes(held)}" for rank, held in ranks)


@contextmanager
def show_training(console: Console, name: str, task: Task) -> Iterator[Display]:
    """Show one training while it runs."""
    if not console.is_terminal:
        yield Display(task, _line_drawer(console, name))
        return
    progress = _make_progress(console)
    bar = progress.add_task(name, total=task.steps)
    with Live(progress, console=console) as live:

        def draw(display: Display) -> None:
            progress.update(bar, completed=len(display.steps))
            live.update(Group(progress, _figures(display)))

        yield Display(task, draw)


def _make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(_SPARKLINE_WIDTH),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _figures(display: Display) -> RenderableType:
    """The figures of the last step, below one another."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right", width=8)
    table.add_column()
    if display.steps:
        losses = [step.loss for step in display.steps]
        table.add_row("loss", f"{sparkline(losses)} {losses[-1]:.4f}")
        table.add_row("speed", display.speed)
        if display.held:
            table.add_row("bubble", format_share(display.steps[-1].bubble))
    if display.held:
        table.add_row("memory", display.memory)
    return table


def _line_drawer(console: Console, name: str) -> Callable[[Display], None]:
    def draw(display: Display) -> None:
        if not display.steps:
            if len(display.held) == display.task.ranks:
                console.print(f"{name} memory: {display.memory}")
            return
        step, steps = display.steps[-1], display.task.steps
        if step.number % max(1, steps // _LOG_LINES) == 0 or step.number in (1, steps):
            bubble = f", bubble {format_share(step.bubble)}" if display.held else ""
            console.print(
                f"{name} step {step.number}/{steps}: loss {step.loss:.4f}, {display.speed}{bubble}"
            )

    return draw


@contextmanager
def show_busy(console: Console, text: str) -> Iterator[None]:
    """Say what is being waited for, in a terminal."""
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextmanager
def show_rounds(console: Console, rounds: int) -> Iterator[Callable[[int], None]]:
    """Show how many rounds are done, in a terminal."""
    if not console.is_terminal:
        yield lambda _done: None
        return
    with _make_progress(console) as progress:
        task = progress.add_task("rounds", total=rounds)
        yield lambda done: progress.update(task, completed=done)
