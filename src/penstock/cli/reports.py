"""The output of the commands: JSON values, tables, and files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock import view
from penstock.atomic_files import write_atomically
from penstock.checks.problem import Problem
from penstock.cli.waiting.busy import busy
from penstock.errors import MissingDependencyError
from penstock.ir.schedule import Schedule
from penstock.schedules.registry import FAMILIES, Family
from penstock.sim.explain import Explanation, Gap
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary
from penstock.sim.timeline import Timeline
from penstock.units import format_number, format_share

if TYPE_CHECKING:
    from penstock.tools.verify.verification import Check

__all__ = [
    "announce",
    "check_result",
    "describe",
    "explanation",
    "explanation_view",
    "families",
    "family_table",
    "gap_table",
    "gap_values",
    "headline",
    "make_console",
    "schedule",
    "timeline",
    "title",
    "to_json",
    "verification",
    "verification_table",
    "write_figure",
    "write_views",
]

# The most gaps, and the most actions of the critical path, that are shown.
_MAX_GAPS = 8
_MAX_LINKS = 24
# What is printed as 0.0 % of a step is left out of lists of causes.
_LEAST_SHARE = 5e-4


def to_json(value: Mapping[str, object]) -> str:
    """Format a value as indented JSON."""
    return json.dumps(value, indent=2)


def families() -> dict[str, object]:
    """Return every family with its default stages per rank, other names and summary."""
    return {
        name: {
            "stages_per_rank": family.stages_per_rank,
            "aliases": list(family.aliases),
            "summary": family.summary,
        }
        for name, family in FAMILIES.items()
    }


def family_table(known: Iterable[Family]) -> Table:
    """Return the families as a table."""
    table = Table(box=None, pad_edge=False)
    for title in ("name", "stages per rank", "what it does"):
        table.add_column(title)
    for family in known:
        table.add_row(family.name, str(family.stages_per_rank), family.summary)
    return table


def describe(found: Schedule) -> str:
    """Return the sizes of a schedule in one line."""
    works = len(found.rows) - int(found.rows.joined.sum())
    return (
        f"{found.num_ranks} ranks, {found.num_stages} stages ({found.placement.style} placement), "
        f"{found.microbatches} microbatches, {works} actions"
    )


def schedule(found: Schedule) -> dict[str, object]:
    """Return a schedule as plain values."""
    return {
        "name": found.name,
        "ranks": found.num_ranks,
        "stages": found.num_stages,
        "microbatches": found.microbatches,
        "rank_of_stage": list(found.placement.rank_of_stage),
        "orders": [[str(work) for work in order] for order in found.orders],
    }


def timeline(found: Timeline, boundary: Boundary = DEFAULT_BOUNDARY) -> dict[str, object]:
    """Return the numbers of a timeline as plain values.

    The step's seconds and idle times are those for the boundary between two steps.
    """
    step = found.repeat(boundary)
    return {
        "boundary": boundary,
        "step_seconds": step.seconds,
        "bubble_rate": step.bubble_rate,
        "end_time": found.end_time,
        "longest_span": found.longest_span,
        "papers_bubble_rate": found.papers_bubble_rate,
        "peak_activations": found.peak_activations,
        "peak_microbatches": found.peak_microbatches,
        "peak_bytes": found.peak_bytes,
        "per_rank": {
            "span": list(found.rank_spans),
            "busy_seconds": list(step.busy_seconds),
            "idle_seconds": list(step.idle_seconds),
            "bubble_rate": list(step.rank_bubble_rates),
            "peak_activations": list(found.rank_peak_activations),
            "peak_bytes": list(found.rank_peak_bytes),
        },
    }


def check_result(found: Schedule, problems: Sequence[Problem]) -> dict[str, object]:
    """Return the result of a check as plain values."""
    return {
        "schedule": describe(found),
        "is_fine": not problems,
        "problems": [
            {
                "rule": problem.rule,
                "rank": problem.rank,
                "position": problem.position,
                "action": problem.action,
                "message": problem.message,
            }
            for problem in problems
        ],
    }


def verification(found: Schedule, model: str, checks: Sequence[Check]) -> dict[str, object]:
    """Return the result of a verification as plain values."""
    return {
        "schedule": describe(found),
        "model": model,
        "is_fine": all(check.is_fine for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def verification_table(checks: Sequence[Check]) -> Table:
    """Return the result of a verification as a table, one line per check."""
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "", "found", "expected"):
        table.add_column(heading)
    for check in checks:
        result = Text("ok", "green") if check.is_fine else Text("FAILED", "bold red")
        table.add_row(check.name, result, check.found, check.expected)
    return table


def explanation(found: Explanation) -> dict[str, object]:
    """Return an explanation as plain values."""
    return {
        "end_time": found.timeline.end_time,
        "critical_path": [
            {"rank": s.rank, "action": str(s.action), "start": s.start, "end": s.end}
            for s in found.critical_path
        ],
        "critical_seconds": found.critical_seconds,
        "idle_seconds": found.idle_seconds,
        "gaps": gap_values(found.gaps),
        "savings": {s.cost: {"seconds": s.seconds, "share": s.share} for s in found.savings},
    }


def gap_values(gaps: Sequence[Gap]) -> list[dict[str, object]]:
    """Return gaps as plain values."""
    return [
        {
            "rank": gap.rank,
            "start": gap.start,
            "end": gap.end,
            "action": str(gap.action),
            "waited_for": str(gap.waited_for),
            "waited_for_rank": gap.waited_for_rank,
            "transfer_seconds": gap.transfer_seconds,
        }
        for gap in gaps
    ]


def headline(timeline: Timeline) -> str:
    """Return when a step ends, and how much of it is idle."""
    seconds, rate = format_number(timeline.end_time), format_share(timeline.bubble_rate)
    return f"the last rank ends after {seconds} s; ranks are idle for {rate} of that"


def explanation_view(found: Explanation, about: str = "") -> RenderableType:
    """Return an explanation as text and tables; `about` says what the headline is about."""
    first = f"{about}{headline(found.timeline)}."
    return Group(
        Text(first[0].upper() + first[1:]),
        Text(),
        Text("Critical path", style="bold"),
        Text(_links(found)),
        Text(f"seconds by kind: {_by_cause(found.critical_seconds)}"),
        Text(),
        Text("Idle time", style="bold"),
        Text(f"seconds of all ranks, waiting for: {_by_cause(found.idle_seconds) or 'nothing'}"),
        gap_table(found.gaps),
        Text(),
        Text("What a 5 % lower cost would save", style="bold"),
        _saving_table(found),
    )


def _links(found: Explanation) -> str:
    texts = [str(span.action) for span in found.critical_path]
    if len(texts) > _MAX_LINKS:
        half = _MAX_LINKS // 2
        texts = [*texts[:half], f"… {len(texts) - 2 * half} more …", *texts[-half:]]
    return " > ".join(texts)


def _by_cause(seconds: Mapping[str, float]) -> str:
    least = _LEAST_SHARE * sum(seconds.values())
    return ", ".join(
        f"{cause} {format_number(value)}" for cause, value in seconds.items() if value > least
    )


def gap_table(gaps: Sequence[Gap]) -> Table:
    """Return the longest gaps as a table."""
    table = Table(box=None, pad_edge=False)
    table.add_column("longest gaps")
    for title in ("from s", "to s", "idle s", "transfer s"):
        table.add_column(title, justify="right")
    table.add_column("because")
    longest = sorted(gaps, key=lambda gap: (-gap.seconds, gap.start))[:_MAX_GAPS]
    for gap in longest:
        table.add_row(
            f"rank {gap.rank}",
            format_number(gap.start),
            format_number(gap.end),
            format_number(gap.seconds),
            format_number(gap.transfer_seconds),
            f"{gap.action} waits for {gap.waited_for} on rank {gap.waited_for_rank}",
        )
    return table


def _saving_table(found: Explanation) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("cost")
    table.add_column("saves s", justify="right")
    table.add_column("of the step", justify="right")
    for saving in found.savings:
        if saving.share < _LEAST_SHARE:
            continue
        table.add_row(saving.cost, format_number(saving.seconds), format_share(saving.share))
    return table


def make_console() -> Console:
    """Return the console for pictures and tables."""
    return Console(soft_wrap=False, highlight=False)


def title(console: Console, text: str) -> None:
    """Print a line that opens a section."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def announce(path: Path) -> None:
    """Say on stderr that a file was written."""
    click.echo(f"wrote {path}", err=True)


def write_views(
    source: Timeline | view.Comparison, html_file: Path | None, figures: Sequence[Path]
) -> None:
    """Write a page and figures, as far as they are asked for, and name each file."""
    if html_file is not None:
        with busy("drawing"):
            write_atomically(html_file, view.page(source))
        announce(html_file)
    for path in figures:
        view.save(source, path)
        announce(path)


def write_figure(console: Console, timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write a comparison as a figure, or say that matplotlib is missing."""
    try:
        view.save(view.Comparison(timelines), path)
    except MissingDependencyError as error:
        console.print(f"(no figure: {error})", markup=False)
    else:
        console.print(f"wrote {path}", markup=False)
