"""The solver at work: a bar of its time, with the best plan so far; nothing in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from penstock.planner.order.solver import Progress
from penstock.view.units import format_number

__all__ = ["show_solving"]


@contextmanager
def show_solving(console: Console, seconds: float) -> Iterator[Callable[[Progress], None] | None]:
    """What `plan` and `search` may tell their progress to while they run for so long."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("solving"),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("solving", total=seconds, numbers="looking at what there is")
        begin = perf_counter()

        def show(progress: Progress) -> None:
            bar.update(task, completed=perf_counter() - begin, numbers=_numbers(progress))

        yield show


def _numbers(progress: Progress) -> str:
    best, bound = progress.makespan, progress.lower_bound
    gap = best / bound - 1 if bound else 0.0
    return f"{progress.trying}: {format_number(best)}, {gap:.1%} above the bound"
