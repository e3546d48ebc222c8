"""Progress of long work: live numbers in a terminal, occasional lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.units import format_bytes, format_number, format_share

if TYPE_CHECKING:
    # Most commands are over before the planner would be loaded.
    from penstock.planner.order.solver import Progress as SolverProgress
    from penstock.tools.demo.task import Task
    from penstock.tools.demo.training import TrainedStep, TrainingReport

__all__ = [
    "Display",
    "show_rounds",
    "show_solving",
    "show_training",
    "sparkline",
]

# The number of lines per training in a log.
_LOG_LINES = 6
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE_WIDTH = 40


def sparkline(values: Sequence[float], *, width: int = _SPARKLINE_WIDTH) -> str:
    """Draw numbers as a line of bars; if there are too many, their means.

    >>> sparkline([8, 4, 2, 1], width=4)
    '█▄▂▁'
    """
    means = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    height = float(np.ptp(means)) or 1.0
    levels = np.rint((means - means.min()) / height * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[level] for level in levels)


@dataclass(slots=True)
class Display:
    """The state of a training so far, shown by `draw` after every change."""

    task: Task
    draw: Callable[[Display], None]
    steps: list[TrainedStep] = field(default_factory=list)
    held: dict[int, float] = field(default_factory=dict)

    def show(self, news: TrainingReport) -> None:
        """Add a step, or the memory of a rank."""
        from penstock.tools.demo.training import HeldBytes

        if isinstance(news, HeldBytes):
            self.held[news.rank] = news.bytes
        else:
            self.steps.append(news)
        self.draw(self)

    @property
    def speed(self) -> str:
        """The tokens per second of the last step."""
        return f"{self.task.tokens_per_step / self.steps[-1].seconds:,.0f} tokens/s"

    @property
    def memory(self) -> str:
        """The peak memory of every rank that has reported it."""
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
    """Return the numbers of the last step, one below the other."""
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
def show_rounds(console: Console, rounds: int) -> Iterator[Callable[[int], None]]:
    """Show in a terminal how many rounds are done."""
    if not console.is_terminal:
        yield lambda _done: None
        return
    with _make_progress(console) as progress:
        bar = progress.add_task("rounds", total=rounds)
        yield lambda done: progress.update(bar, completed=done)


@contextmanager
def show_solving(
    console: Console, seconds: float
) -> Iterator[Callable[[SolverProgress], None] | None]:
    """Yield a callback for `plan` and `search` that shows the time used and the best plan so far.

    Outside a terminal nothing is shown.
    """
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("solving"),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("solving", total=seconds, numbers="starting")
        begin = perf_counter()

        def show(found: SolverProgress) -> None:
            completed = perf_counter() - begin
            progress.update(bar, completed=completed, numbers=_describe_solver(found))

        yield show


def _describe_solver(progress: SolverProgress) -> str:
    best, bound = progress.step, progress.lower_bound
    gap = max(0.0, best / bound - 1) if bound else 0.0
    return f"{progress.trying}: {format_number(best)} s, {format_share(gap)} above the bound"
