"""`penstock soak`: thousands of steps of random schedules, with injected faults."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli import options
from penstock.cli.inputs import require_torch
from penstock.errors import ArgumentError

if TYPE_CHECKING:
    from penstock.tools.soak.soak import AnyCase, SoakProgress, SoakRequest, Summary

__all__ = ["show_summary", "soak_command"]

_DEFAULT_MINUTES = 10.0
# Time between two lines in a log.
_SECONDS_BETWEEN_LINES = 10.0


@options.command("soak")
@click.option(
    "--minutes", type=options.POSITIVE, metavar="MINUTES", help="Duration. [default: 10]"
)
@click.option(
    "--steps", type=options.COUNT, metavar="N", help="Number of steps, instead of a duration."
)
@click.option(
    "--case", type=click.IntRange(0), metavar="N", help="Repeat only the case with this number."
)
@options.ranks_option(4, "Maximum number of ranks.")
@click.option(
    "--seed",
    type=int,
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the random cases.",
)
@click.option(
    "--faults/--no-faults",
    "has_faults",
    default=True,
    show_default=True,
    help="In some cases, let ranks fail, exit, be killed, be stopped or lose their link.",
)
def soak_command(
    minutes: float | None,
    steps: int | None,
    case: int | None,
    ranks: int,
    seed: int,
    has_faults: bool,
) -> None:
    """Train random schedules under bad conditions, and check every step.

    A case is a schedule (of a family, planned, or in a random order), a model with skips, ties and
    frozen parts, and batches of changing shapes. It runs over links that are slow and deliver out
    of order, in one process or in one per rank. Every gradient is compared with that of the
    unsplit model; after every case, tensors, threads, open files, processes and memory are
    counted. After a fault, all other ranks must name the failed rank in time. Some cases save and
    load a checkpoint, and some are elastic trainings that start again after every fault.

    The first failure ends the run with exit code 1 and the command that repeats it.

    \b
    Examples:
      penstock soak
      penstock soak --steps 500 --ranks 2 --no-faults
      penstock soak --seed 0 --ranks 4 --faults --case 17
    """
    require_torch()
    from penstock.tools.soak.soak import SoakRequest, soak

    if [minutes, steps, case].count(None) < 2:
        raise ArgumentError("--minutes, --steps and --case exclude each other; give one of them")
    if steps is None and case is None:
        minutes = _DEFAULT_MINUTES if minutes is None else minutes
    seconds = None if minutes is None else 60 * minutes
    request = SoakRequest(seed, ranks, has_faults, steps, seconds, case)
    console = Console(soft_wrap=True, highlight=False)
    with _show_cases(console, request) as show:
        summary = soak(request, show)
    show_summary(console, request, summary)
    sys.exit(1 if summary.problem else 0)


def show_summary(console: Console, request: SoakRequest, summary: Summary) -> None:
    """Print the final numbers, and how to repeat a failure."""
    console.print(_table(summary.progress))
    if summary.problem:
        console.print(f"failed: {summary.problem}", markup=False)
        console.print(f"seed: {request.seed}\nrepeat: {summary.command}")
    else:
        console.print(f"passed; repeat: {request.command}")


@contextmanager
def _show_cases(
    console: Console, request: SoakRequest
) -> Iterator[Callable[[AnyCase, SoakProgress], None]]:
    """Yield a function that shows a case: in a live table, or as occasional lines in a log."""
    if not console.is_terminal:
        yield _line_printer(console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def show(case: AnyCase, progress: SoakProgress) -> None:
            what = Text(f"{request.command}\n{case}")
            live.update(Group(what, _table(progress)))

        yield show


def _line_printer(console: Console) -> Callable[[AnyCase, SoakProgress], None]:
    printed = monotonic()

    def show(case: AnyCase, progress: SoakProgress) -> None:
        nonlocal printed
        if monotonic() - printed >= _SECONDS_BETWEEN_LINES:
            printed = monotonic()
            numbers = ", ".join(f"{name} {value}" for name, value in _numbers(progress).items())
            console.print(f"{numbers}; now {case}")

    return show


def _table(progress: SoakProgress) -> Table:
    # One number per line: side by side they are wider than a terminal, and lose their names.
    table = Table(show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in _numbers(progress).items():
        table.add_row(name, value)
    return table


def _numbers(progress: SoakProgress) -> dict[str, str]:
    rate = progress.steps / progress.seconds if progress.seconds else 0.0
    return {
        "cases": str(progress.cases),
        "steps": str(progress.steps),
        "steps/s": f"{rate:.1f}",
        "faults survived": str(progress.faults),
        "with replicas": str(progress.replicated),
        "by order": str(progress.by_order),
        "restored": str(progress.restored),
        "elastic restarts": str(progress.restarts),
        "worst gradient error": f"{progress.worst.error:.1e}",
        "largest process": f"{progress.memory / 2**20:.0f} MiB",
        "time": f"{progress.seconds:.0f} s",
    }
