"""Figures to scale, as in the papers: ranks down, time across, memory per rank below.

Needs matplotlib. Figures are made without pyplot, so that global state stays untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.atomic_files import replacing
from penstock.errors import ArgumentError, MissingDependencyError
from penstock.ir.actions import Kind
from penstock.ir.rows import ABSENT
from penstock.sim.timeline import Timeline
from penstock.units import format_bytes, format_number, format_share
from penstock.view.layout import BUSY_KINDS, LANE_HEIGHT, Rectangles, rectangles
from penstock.view.palette import BORDER, IDLE, INK, LOOKS, MEMORY, PAPER, shade, text_colour
from penstock.view.sheet import MARGINS, PANEL_GAP, Sheet, plan_sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = ["draw", "draw_comparison", "save", "show"]

_Numbers: TypeAlias = NDArray[np.floating[Any]]

_SUFFIXES = (".png", ".svg", ".pdf")

# Inches: the largest width of a bar in the memory panel, and the height of the panel.
_MEMORY_BAR = (0.5, 0.7)

# Points: text, numbers on bars (the first size at which nearly all fit), the space around them.
_TEXT_SIZE = 8.0
_NUMBER_SIZES = (8.0, 7.0, 6.0, 5.0)
_NUMBER_MARGIN = 1.0

# A vector file with more bars is slow to open, so they become an image inside it.
_MAX_VECTOR_BARS = 20_000


def draw(
    timeline: Timeline, *, title: str | None = None, kinds: Collection[Kind] = BUSY_KINDS
) -> Figure:
    """Draw one timeline to scale, with the peak memory of every rank below."""
    bars, num_ranks = rectangles(timeline, kinds), timeline.schedule.num_ranks
    legend = _legend([bars])
    sheet = plan_sheet([bars], [num_ranks], num_labels=len(legend), extra_heights=[_MEMORY_BAR[1]])
    figure, (axes, memory_axes) = _start_figure(sheet)
    _draw_panel(axes, timeline, bars, sheet)
    _label_panel(axes, timeline, timeline.schedule.name if title is None else title)
    axes.set_xlabel("time", fontsize=_TEXT_SIZE)
    _draw_memory(memory_axes, timeline, sheet)
    _draw_legend(figure, legend, sheet)
    return figure


def draw_comparison(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw named timelines below one another on one time axis."""
    if not timelines:
        raise ArgumentError("timelines must not be empty; give at least one")
    all_bars = [rectangles(timeline) for timeline in timelines.values()]
    num_ranks = [timeline.schedule.num_ranks for timeline in timelines.values()]
    legend = _legend(all_bars)
    sheet = plan_sheet(all_bars, num_ranks, num_labels=len(legend))
    figure, all_axes = _start_figure(sheet)
    for axes, bars, (name, timeline) in zip(all_axes, all_bars, timelines.items(), strict=True):
        _draw_panel(axes, timeline, bars, sheet)
        _label_panel(axes, timeline, name)
    all_axes[-1].set_xlabel("time", fontsize=_TEXT_SIZE)
    _draw_legend(figure, legend, sheet)
    return figure


def save(figure: Figure, path: Path | str) -> None:
    """Write a figure to a file; the suffix selects the format: .png, .svg or .pdf."""
    file = Path(path)
    if file.suffix.lower() not in _SUFFIXES:
        raise ArgumentError(
            f"the name of a figure must end in {', '.join(_SUFFIXES)} (got {file.name!r})"
        )
    with replacing(file) as partial:
        figure.savefig(partial, dpi=200)


def show(figure: Figure) -> None:
    """Open a window with the figure and wait until it is closed."""
    from matplotlib import pyplot

    canvas = pyplot.figure(figsize=tuple(figure.get_size_inches())).canvas
    canvas.figure = figure
    figure.set_canvas(canvas)
    pyplot.show()


def _start_figure(sheet: Sheet) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with one set of axes per height of the sheet, from the top down."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "drawing needs matplotlib; run pip install 'penstock[figure]'"
        ) from error

    width, height = sheet.size
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    all_axes = []
    top = height - MARGINS["top"]
    for panel in sheet.heights:
        left, bottom = MARGINS["left"] / width, (top - panel) / height
        axes = figure.add_axes((left, bottom, sheet.width / width, panel / height))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=_TEXT_SIZE, length=2.5)
        all_axes.append(axes)
        top -= panel + PANEL_GAP
    return figure, all_axes


def _draw_panel(axes: Axes, timeline: Timeline, bars: Rectangles, sheet: Sheet) -> None:
    num_ranks = timeline.schedule.num_ranks
    axes.set_xlim(0, sheet.seconds)
    axes.set_ylim(num_ranks - 0.5, -0.5)
    colours, number = _colours(bars)
    _draw_lanes(axes, num_ranks, bars.seconds)
    _draw_bars(axes, bars, colours[number], sheet)
    inks = np.array([text_colour(colour) for colour in colours.tolist()], dtype=np.str_)
    _draw_numbers(axes, bars, inks[number], sheet)
    ranks = range(0, num_ranks, _thin(num_ranks, sheet.points_per_lane / _TEXT_SIZE))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)


def _label_panel(axes: Axes, timeline: Timeline, title: str) -> None:
    number = timeline.peak_microbatches
    held = f"{format_number(number)} microbatch{'es' * (number != 1)}"
    if timeline.peak_bytes:
        held = format_bytes(timeline.peak_bytes)
    seconds, bubble = format_number(timeline.end_time), format_share(timeline.bubble_rate)
    summary = f"end time {seconds} s    bubble {bubble}    peak {held}"
    # Dollar signs in a name do not start a formula.
    axes.set_title(
        title,
        loc="left",
        fontsize=_TEXT_SIZE + 2,
        fontweight="bold",
        color=INK,
        parse_math=False,
    )
    axes.set_title(summary, loc="right", fontsize=_TEXT_SIZE, color=INK)


def _colours(bars: Rectangles) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """Return the colours that occur, and the index of each bar's colour."""
    count = bars.num_local_stages
    codes, number = np.unique(
        bars.kind.astype(np.int64) * count + bars.local_stage, return_inverse=True
    )
    pairs = (divmod(code, count) for code in codes.tolist())
    colours = [shade(Kind(kind), local_stage, count) for kind, local_stage in pairs]
    return np.array(colours, dtype=np.str_), number


def _draw_lanes(axes: Axes, num_ranks: int, seconds: float) -> None:
    """Draw idle time, which stays visible wherever no bar covers it."""
    rank, half = np.arange(num_ranks), LANE_HEIGHT / 2
    lanes = _boxes(np.zeros(num_ranks), np.full(num_ranks, seconds), rank - half, rank + half)
    lanes.set(facecolor=IDLE, edgecolor="none", zorder=0)
    axes.add_collection(lanes, autolim=False)


def _draw_bars(axes: Axes, bars: Rectangles, colour: NDArray[np.str_], sheet: Sheet) -> None:
    """Draw the bars, with a border around overlapped pairs."""
    left, right = bars.left - bars.begin, bars.right - bars.begin
    median_points = float(np.median(right - left)) * sheet.points_per_second if len(bars) else 0.0
    line_width = min(0.7, median_points / 12, sheet.points_per_lane / 36)
    boxes = _boxes(left, right, bars.top, bars.bottom)
    boxes.set(facecolor=colour, edgecolor=PAPER, linewidth=line_width, zorder=1)
    pair, half = bars.is_overlapped, LANE_HEIGHT / 2
    rank = bars.rank[pair]
    borders = _boxes(left[pair], right[pair], rank - half, rank + half)
    borders.set(facecolor="none", edgecolor=BORDER, linewidth=2 * line_width, zorder=2)
    for collection in (boxes, borders):
        collection.set_rasterized(len(bars) > _MAX_VECTOR_BARS)
        axes.add_collection(collection, autolim=False)


def _draw_numbers(axes: Axes, bars: Rectangles, ink: NDArray[np.str_], sheet: Sheet) -> None:
    """Write the microbatch on every bar with room for it, in one size for the whole panel."""
    fits = np.zeros(len(bars), dtype=np.bool_)
    for size in _NUMBER_SIZES:
        fits = _fits(bars, size, sheet)
        if fits.sum() > 0.9 * len(fits):
            break
    x = (bars.left + bars.right) / 2 - bars.begin
    y = (bars.top + bars.bottom) / 2
    for bar in np.flatnonzero(fits).tolist():
        axes.text(
            x[bar],
            y[bar],
            str(bars.microbatch[bar]),
            color=ink[bar],
            fontsize=size,
            ha="center",
            va="center_baseline",
            zorder=3,
        )


def _fits(bars: Rectangles, size: float, sheet: Sheet) -> NDArray[np.bool_]:
    """Return for every bar whether the number of its microbatch fits inside at this size."""
    from matplotlib.textpath import TextPath

    # Measured with the longest number, so that bars of one width are all numbered or all bare.
    longest = "0" * len(str(bars.microbatch.max(initial=0)))
    text = TextPath((0, 0), longest, size=size).get_extents()
    width = (bars.right - bars.left) * sheet.points_per_second - 2 * _NUMBER_MARGIN
    height = (bars.bottom - bars.top) * sheet.points_per_lane - 2 * _NUMBER_MARGIN
    is_numbered: NDArray[np.bool_] = bars.microbatch != ABSENT
    return is_numbered & (text.width <= width) & (text.height <= height)


def _draw_memory(axes: Axes, timeline: Timeline, sheet: Sheet) -> None:
    """Draw the peak memory of each rank: in bytes if they are known, else in activations."""
    num_ranks = timeline.schedule.num_ranks
    bar = min(_MEMORY_BAR[0], sheet.width / num_ranks)
    left, bottom, width, height = axes.get_position().bounds
    axes.set_position((left, bottom, width * bar * num_ranks / sheet.width, height))
    has_bytes = bool(timeline.peak_bytes)
    peaks = timeline.rank_peak_bytes if has_bytes else timeline.rank_peak_activations
    bars = axes.bar(range(num_ranks), peaks, width=0.7, color=MEMORY)
    if bar == _MEMORY_BAR[0]:
        labels = [format_bytes(peak) if has_bytes else str(peak) for peak in peaks]
        axes.bar_label(bars, labels, fontsize=_TEXT_SIZE - 2, color=INK, padding=1)
    ranks = range(0, num_ranks, _thin(num_ranks, bar / 0.25))
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlim(-0.5, num_ranks - 0.5)
    axes.set_ylim(0, 1.25 * max(*peaks, 1))
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0)
    label = "peak bytes per rank" if has_bytes else "peak activations per rank"
    axes.set_title(label, loc="left", fontsize=_TEXT_SIZE, color=INK)


def _legend(all_bars: Sequence[Rectangles]) -> dict[str, tuple[dict[str, Any], ...]]:
    """Return the patches of every legend entry; a kind has one shade per stage of a rank."""
    count = max(bars.num_local_stages for bars in all_bars)
    kinds = sorted({kind for bars in all_bars for kind in bars.kinds})
    legend: dict[str, tuple[dict[str, Any], ...]] = {
        LOOKS[kind].label: tuple(
            {"facecolor": shade(kind, local_stage, count)} for local_stage in range(count)
        )
        for kind in kinds
    }
    legend["Idle"] = ({"facecolor": IDLE},)
    if any(bars.is_overlapped.any() for bars in all_bars):
        legend["Overlapped"] = ({"facecolor": PAPER, "edgecolor": BORDER, "linewidth": 1.4},)
    return legend


def _draw_legend(
    figure: Figure, legend: dict[str, tuple[dict[str, Any], ...]], sheet: Sheet
) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    keys: list[tuple[Patch, ...]] = [
        tuple(Patch(**look) for look in looks) for looks in legend.values()
    ]
    figure.legend(  # type: ignore[call-overload]  # the stubs lack tuples as keys
        keys,
        list(legend),
        loc="lower center",
        ncols=sheet.legend_columns,
        fontsize=_TEXT_SIZE,
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        borderaxespad=0.3,
    )


def _boxes(left: _Numbers, right: _Numbers, top: _Numbers, bottom: _Numbers) -> PolyCollection:
    from matplotlib.collections import PolyCollection

    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    return PolyCollection(vertices)  # type: ignore[arg-type]  # one array is the fast way


def _thin(count: int, room_per_label: float) -> int:
    """Return the smallest power of two that, as a step, leaves enough room for each label."""
    step = 1
    while step < count and step * room_per_label < 1:
        step *= 2
    return step
