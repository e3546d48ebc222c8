"""The comparison of the demo: the plan with known schedules, predicted and measured."""

from __future__ import annotations

from os import cpu_count
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from penstock.cli.reports import title
from penstock.cli.waiting.progress import show_rounds
from penstock.units import format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.tools.demo.candidates import DemoCandidate
    from penstock.tools.demo.comparison import Result
    from penstock.tools.demo.task import Task

__all__ = ["compare_and_show", "describe_times"]

_MAX_ROUNDS = 12


def compare_and_show(
    console: Console, task: Task, candidates: Sequence[DemoCandidate], *, memory: float
) -> list[Result]:
    """Run steps of the candidates in turn, and show them beside the prediction."""
    from penstock.tools.demo.comparison import compare_candidates

    rounds = min(_MAX_ROUNDS, task.steps)
    title(console, f"Compare: {_listed([candidate.name for candidate in candidates])}")
    with show_rounds(console, rounds) as report:
        results = compare_candidates(task, candidates, rounds=rounds, on_round=report)
    console.print(_time_table(results))
    console.print()
    console.print(_memory_table(results, memory))
    console.print(
        f"medians of {rounds} steps each, run in turn; the spread is the range of their middle "
        "half; predicted from the measured pieces; the peak is that of the fullest rank"
    )
    console.print(describe_times(results))
    if task.device == "cpu" and task.ranks >= (cpu_count() or 1):
        console.print(
            f"({task.ranks} ranks share {cpu_count()} processor cores with everything else that "
            "runs here)"
        )
    return results


def _listed(names: Sequence[str]) -> str:
    """Return names as in a sentence.

    >>> _listed(["the plan", "1F1B", "GPipe"])
    'the plan, 1F1B and GPipe'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _time_table(results: Sequence[Result]) -> Table:
    first = results[0]
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for heading in ("step ms", "spread", "ratio", "predicted ms", "bubble", "predicted bubble"):
        table.add_column(heading, justify="right")
    for result in results:
        predicted = result.candidate.predicted
        table.add_row(
            result.candidate.name,
            f"{1e3 * result.typical:.1f}",
            format_share(result.spread),
            f"{result.typical / first.typical:.2f}",
            f"{1e3 * predicted.end_time:.1f}",
            format_share(result.recorded.bubble_rate),
            format_share(predicted.bubble_rate),
        )
    return table


def _memory_table(results: Sequence[Result], limit: float) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for heading in ("peak of a rank", "predicted", f"of {format_bytes(limit)}"):
        table.add_column(heading, justify="right")
    for result in results:
        held = max(result.held)
        table.add_row(
            result.candidate.name,
            format_bytes(held),
            format_bytes(result.candidate.predicted.peak_bytes),
            format_share(held / limit),
        )
    return table


def describe_times(results: Sequence[Result]) -> str:
    """Name the fastest schedule, if it is clear, and compare the others with the first."""
    first, *others = results
    fastest = min(results, key=lambda result: result.typical)
    second = min(result.typical for result in results if result is not fastest)
    variation = max(result.spread for result in results)
    winner = f"{fastest.candidate.name} was fastest"
    if second / fastest.typical - 1 <= variation:
        winner = (
            f"no clear winner, since steps of one schedule vary by up to {format_share(variation)}"
        )
    ratios = ", ".join(f"{r.candidate.name} {r.typical / first.typical:.2f}" for r in others)
    return f"{winner}; relative to {first.candidate.name}: {ratios}"
