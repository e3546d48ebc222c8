"""The verbs of `penstock.view`: draw, compare, plot, page, report, write_trace and save.

Each takes a schedule, a timeline, a plan, the name of a family or a file. A family needs `ranks`
and `microbatches`; `costs` price a schedule, with unit costs by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.atomic_files import write_atomically
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.planner.curves import MemoryCurve
from penstock.planner.partition.partition import Partition
from penstock.planner.plans import Plan
from penstock.planner.search.findings import Findings
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary, require_boundary
from penstock.sim.throughput import Workload
from penstock.sim.timeline import Timeline
from penstock.view.curve import curve_figure, curve_view
from penstock.view.drawing import Comparison, Drawing
from penstock.view.figure import draw as draw_figure
from penstock.view.figure import draw_comparison
from penstock.view.figure import save as save_figure
from penstock.view.html.page import page as html_page
from penstock.view.plan_report import findings_report, plan_report
from penstock.view.sources import Source, is_file, price_alike, read_source, timeline_of
from penstock.view.text.findings import findings_view
from penstock.view.text.partition import balance_table
from penstock.view.text.timeline import TimelinePicture
from penstock.view.trace import write_trace as write_trace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["compare", "draw", "page", "plot", "report", "save", "write_trace"]

Drawable: TypeAlias = Source | Comparison | Partition | Findings | MemoryCurve
_SAVED_WIDTH = 120


def draw(
    source: Drawable,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
    width: int | None = None,
) -> Drawing:
    """Draw for the terminal: letters with `print`, colours with `rich.print`.

    Also takes a `Comparison`, a `Partition`, the `Findings` of a search and a `MemoryCurve`.
    `width` is in characters; by default the picture is as wide as the terminal.

    >>> draw("1F1B", ranks=2, microbatches=2, width=26)
    rank 0  F0F1....B0--..B1--
    rank 1  ..F0B0--F1B1--....
            |0 s      |5
            F Forward
            B Full backward
            . Idle
    """
    if isinstance(source, Comparison | Partition | Findings | MemoryCurve):
        _refuse_settings(source, ranks, microbatches, costs)
    match source:
        case Partition():
            return Drawing(balance_table(source), width)
        case Findings():
            return Drawing(findings_view(source), width)
        case MemoryCurve():
            return Drawing(curve_view(source), width)
        case Comparison():
            parts: list[RenderableType] = []
            for name, timeline in source.timelines.items():
                parts += [Text(f"{name}:"), TimelinePicture(timeline), Text()]
            return Drawing(Group(*parts, source), width)
        case _:
            timeline = timeline_of(source, ranks=ranks, microbatches=microbatches, costs=costs)
            return Drawing(TimelinePicture(timeline), width)


def compare(
    sources: Mapping[str, Source] | Iterable[Source],
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
    boundary: Boundary = DEFAULT_BOUNDARY,
    workload: Workload | None = None,
) -> Comparison:
    """Put schedules and timelines side by side; print the result, or give it to another view.

    Schedules are priced for the same model: a single number in `costs` is for one rank's share.
    Give a mapping to choose the names. `boundary` is what happens between two steps, and decides
    which seconds are compared: by default those until the last rank ends. With a `workload`
    (`penstock.sim.Workload`) the table has tokens per second and MFU.

    >>> compare(["1F1B", "ZBV"], ranks=4, microbatches=8)
    schedule  end time s  ratio  bubble  peak microbatches
    1F1B              33  1.000  27.3 %                  4
    ZBV             25.5  0.773   5.9 %                  4
    """
    found = price_alike(sources, ranks=ranks, microbatches=microbatches, costs=costs)
    require_boundary(boundary)
    return Comparison(found, boundary, workload)


def plot(
    source: Source | Comparison | MemoryCurve,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
) -> Figure:
    """Draw a matplotlib figure to scale, with the peak memory of every rank below.

    The timelines of a `Comparison` go below one another on one time axis. A `MemoryCurve` is
    seconds against bytes, with the bound as a second curve.
    """
    if isinstance(source, MemoryCurve):
        _refuse_settings(source, ranks, microbatches, costs)
        return curve_figure(source)
    if isinstance(source, Comparison):
        _refuse_settings(source, ranks, microbatches, costs)
        return draw_comparison(source.timelines)
    timeline = timeline_of(source, ranks=ranks, microbatches=microbatches, costs=costs)
    return draw_figure(timeline)


def page(
    source: Source | Comparison,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
    title: str | None = None,
) -> str:
    """Return one self-contained HTML file: timelines to zoom into, and their numbers.

    >>> page("ZBV", ranks=4, microbatches=8)[:15]
    '<!doctype html>'
    """
    if isinstance(source, Comparison):
        _refuse_settings(source, ranks, microbatches, costs)
        return html_page(source.timelines, title=title)
    timeline = timeline_of(source, ranks=ranks, microbatches=microbatches, costs=costs)
    return html_page(timeline, title=title)


def report(source: Plan | Findings) -> str:
    """Return a report of a plan, or of a search, in Markdown."""
    match source:
        case Plan():
            return plan_report(source)
        case Findings():
            return findings_report(source)
        case _:
            raise ArgumentError(
                f"source must be a Plan or the Findings of a search (got a value of "
                f"type {type(source).__name__}); for schedules and timelines use page or draw"
            )


def write_trace(
    source: Source,
    path: Path | str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
) -> None:
    """Write a trace for Perfetto (ui.perfetto.dev); a name ending in .gz is compressed."""
    timeline = timeline_of(source, ranks=ranks, microbatches=microbatches, costs=costs)
    write_trace_file(timeline, path)


def save(
    source: Source | Comparison | Findings | MemoryCurve,
    path: Path | str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
) -> None:
    """Save a view; the ending of the name selects which.

    .png, .svg and .pdf are figures, .html is a page, .txt a drawing in letters, .md the report of
    a plan or search, .trace.json (or .trace.json.gz) a trace for Perfetto.
    """
    file = Path(path)
    ending = _ending_of(file)
    if ending == _REPORT:
        _refuse_settings(source, ranks, microbatches, costs)
        write_atomically(file, report(_planned(source)))
        return
    if isinstance(source, Findings):
        raise ArgumentError(
            f"the findings of a search must be saved as {_REPORT} (got {file.name!r}); save the "
            "plan `findings.best` for a picture"
        )
    if isinstance(source, MemoryCurve):
        _refuse_settings(source, ranks, microbatches, costs)
        _save_curve(source, file, ending)
        return
    if isinstance(source, Comparison):
        _refuse_settings(source, ranks, microbatches, costs)
        _WRITERS[ending](source, file)
        return
    found = timeline_of(source, ranks=ranks, microbatches=microbatches, costs=costs)
    _WRITERS[ending](found, file)


def _refuse_settings(
    source: object, ranks: int | None, microbatches: int | None, costs: Costs | None
) -> None:
    """Reject arguments that would have no effect, because the source is already priced."""
    settings = {"ranks": ranks, "microbatches": microbatches, "costs": costs}
    if given := [name for name, value in settings.items() if value is not None]:
        raise ArgumentError(
            f"{' and '.join(given)} must be left out for a source that is already priced (got a "
            f"value of type {type(source).__name__})"
        )


def _planned(source: Source | Comparison | Findings | MemoryCurve) -> Plan | Findings:
    """Return the plan or the findings to report on, read from a file if need be."""
    found = read_source(source) if isinstance(source, str | Path) and is_file(source) else source
    if not isinstance(found, Plan | Findings):
        raise ArgumentError(
            f"a report must be of a Plan or the Findings of a search (got a value of type "
            f"{type(found).__name__}); save other sources as .html or .png"
        )
    return found


def _save_curve(source: MemoryCurve, file: Path, ending: str) -> None:
    match ending:
        case ".png" | ".svg" | ".pdf":
            save_figure(curve_figure(source), file)
        case ".txt":
            write_atomically(file, f"{draw(source, width=_SAVED_WIDTH)}\n")
        case _:
            raise ArgumentError(
                f"a curve must be saved as .png, .svg, .pdf or .txt (got {file.name!r})"
            )


def _save_figure(source: Timeline | Comparison, file: Path) -> None:
    save_figure(plot(source), file)


def _save_page(source: Timeline | Comparison, file: Path) -> None:
    write_atomically(file, page(source))


def _save_text(source: Timeline | Comparison, file: Path) -> None:
    write_atomically(file, f"{draw(source, width=_SAVED_WIDTH)}\n")


def _save_trace(source: Timeline | Comparison, file: Path) -> None:
    if isinstance(source, Comparison):
        raise ArgumentError("a trace must be of one timeline (got a Comparison); save each one")
    write_trace(source, file)


_REPORT = ".md"
# The ending of a name, and the function that writes such a file.
_WRITERS: dict[str, Callable[[Timeline | Comparison, Path], None]] = {
    ".png": _save_figure,
    ".svg": _save_figure,
    ".pdf": _save_figure,
    ".html": _save_page,
    ".txt": _save_text,
    ".trace.json": _save_trace,
    ".trace.json.gz": _save_trace,
}


def _ending_of(file: Path) -> str:
    endings = (*_WRITERS, _REPORT)
    for ending in endings:
        if file.name.lower().endswith(ending):
            return ending
    raise ArgumentError(
        f"the name of a view must end in {', '.join(endings)} (got {file.name!r}); to save data "
        "use Plan.to_file, Schedule.to_csv or write_timeline"
    )
