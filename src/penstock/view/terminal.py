"""Timelines and tables for the terminal: ranks down, time across, one line per rank.

rank 0  F0F1F2F3............B0--      every column is an equal slice of time and shows
rank 1  ..F0F1F2......B0--F3B1--      what takes most of it
        |0        |5        |10
"""

from collections.abc import Mapping
from itertools import groupby

import numpy as np
from rich.table import Table
from rich.text import Text

from penstock.ir.actions import Kind
from penstock.sim.timeline import Timeline
from penstock.view.grid import Grid, fill_grid, wide_bars
from penstock.view.palette import LOOKS, shade, text_colour
from penstock.view.units import format_bytes, format_number, format_share, nice_step

__all__ = ["plain_timeline_view", "rank_table", "summary_table", "timeline_view"]

_HALF_BLOCK = "▀"
_COLUMNS_PER_TICK = 8


def timeline_view(timeline: Timeline, *, width: int) -> Text:
    """A timeline in colour, to scale; an overlapped pair has its forward in the upper half."""
    grid = fill_grid(timeline, width - _margin(timeline.schedule.num_ranks))
    places = grid.bars.num_places
    colours = [shade(*grid.kind_and_place(code), places) for code in range(grid.idle)]
    upper, lower = grid.upper.copy(), grid.lower.copy()
    letters = np.where(upper == lower, " ", _HALF_BLOCK)
    letters[(upper == grid.idle) & (lower == grid.idle)] = "·"
    for bar in wide_bars(grid):
        cells = bar.rank, bar.columns_for(bar.digits)
        letters[cells] = list(bar.digits)
        upper[cells] = lower[cells] = bar.code
    lines = [
        _colour_line(letters[rank].tolist(), upper[rank].tolist(), lower[rank].tolist(), colours)
        for rank in range(grid.num_ranks)
    ]
    return _frame(grid, lines, _colour_legend(grid), width)


def plain_timeline_view(timeline: Timeline, *, width: int) -> Text:
    """A timeline in letters, to scale: `F3--` is a forward, `F3&&B1` an overlapped pair.

    Later stages of a rank are in lower case.
    """
    grid = fill_grid(timeline, width - _margin(timeline.schedule.num_ranks))
    alphabet = np.array([*(_letter(*grid.kind_and_place(code)) for code in range(grid.idle)), "."])
    letters = np.where(grid.upper == grid.lower, alphabet[grid.upper], "&")
    for bar in wide_bars(grid):
        text, num_columns = str(alphabet[bar.code]) + bar.digits, bar.right - bar.left
        if bar.is_overlapped and num_columns == 2:
            continue
        if not bar.is_overlapped:
            text = text.ljust(num_columns, "-")
        letters[bar.rank, bar.columns_for(text)] = list(text)
    lines = [Text("".join(line)) for line in letters.tolist()]
    return _frame(grid, lines, _plain_legend(grid), width)


def summary_table(timelines: Mapping[str, Timeline]) -> Table:
    """Compare timelines by name: time, idle time and memory, and time against the first."""
    has_bytes = any(timeline.peak_bytes for timeline in timelines.values())
    table = _table("schedule", "makespan", "ratio", "bubble", "peak microbatches")
    if has_bytes:
        table.add_column("peak bytes", justify="right")
    first = next((timeline.makespan for timeline in timelines.values()), 0.0)
    for name, timeline in timelines.items():
        cells = [
            format_number(timeline.makespan),
            f"{timeline.makespan / first:.3f}" if first else "",
            format_share(timeline.bubble_rate),
            format_number(timeline.peak_microbatches),
        ]
        if has_bytes:
            cells.append(format_bytes(timeline.peak_bytes))
        table.add_row(Text(name), *cells)
    return table


def rank_table(timeline: Timeline) -> Table:
    """What each rank of a timeline holds and how busy it is."""
    has_bytes = bool(timeline.peak_bytes)
    table = _table("rank", "stages", "busy", "idle", "bubble", "peak activations")
    if has_bytes:
        table.add_column("peak bytes", justify="right")
    busy, idle, bubble = timeline.busy_seconds, timeline.idle_seconds, timeline.rank_bubble_rates
    for rank in range(timeline.schedule.num_ranks):
        cells = [
            " ".join(map(str, timeline.schedule.placement.stages(rank))),
            format_number(busy[rank]),
            format_number(idle[rank]),
            format_share(bubble[rank]),
            str(timeline.rank_peak_activations[rank]),
        ]
        if has_bytes:
            cells.append(format_bytes(timeline.rank_peak_bytes[rank]))
        table.add_row(str(rank), *cells)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _margin(num_ranks: int) -> int:
    """The width of the rank labels, with the space that follows them."""
    return len(f"rank {num_ranks - 1}") + 2


def _colour_line(
    letters: list[str], upper: list[int], lower: list[int], colours: list[str]
) -> Text:
    line = Text()
    cells = zip(letters, zip(upper, lower, strict=True), strict=True)
    for halves, run in groupby(cells, key=lambda cell: cell[1]):
        line.append("".join(letter for letter, _ in run), _style(colours, *halves))
    return line


def _style(colours: list[str], above: int, below: int) -> str:
    """The style of a cell by the codes of its halves; idle time has no colour of its own."""
    is_busy_above, is_busy_below = above < len(colours), below < len(colours)
    if above == below:
        return f"{text_colour(colours[above])} on {colours[above]}" if is_busy_above else "dim"
    front = colours[above] if is_busy_above else "default"
    return f"{front} on {colours[below]}" if is_busy_below else front


def _letter(kind: Kind, place: int) -> str:
    return LOOKS[kind].letter.lower() if place else LOOKS[kind].letter


def _frame(grid: Grid, lines: list[Text], legend: list[Text], width: int) -> Text:
    """The lines with rank labels before them, and the time axis and the legend below."""
    margin = _margin(grid.num_ranks)
    picture = [Text(f"rank {rank}".ljust(margin)) + line for rank, line in enumerate(lines)]
    below = [Text(_axis(grid)), *_wrap(legend, width - margin)]
    return Text("\n").join([*picture, *(Text(" " * margin) + line for line in below)])


def _axis(grid: Grid) -> str:
    step = nice_step(grid.seconds_per_column * _COLUMNS_PER_TICK)
    axis = ""
    for tick in range(grid.num_columns):
        column = round(tick * step / grid.seconds_per_column)
        label = f"|{format_number(tick * step)}"
        if column + len(label) > grid.num_columns:
            break
        axis = axis.ljust(column) + label
    return axis


def _colour_legend(grid: Grid) -> list[Text]:
    items = [
        Text.assemble(("  ", f"on {LOOKS[kind].colour}"), f" {LOOKS[kind].label}")
        for kind in grid.bars.kinds
    ]
    items.append(Text.assemble(("··", "dim"), " Idle"))
    if grid.bars.num_places > 1:
        items.append(Text("lighter: later stages"))
    return items


def _plain_legend(grid: Grid) -> list[Text]:
    items = [Text(f"{LOOKS[kind].letter} {LOOKS[kind].label}") for kind in grid.bars.kinds]
    if grid.bars.is_overlapped.any():
        items.append(Text("& Overlapped"))
    items.append(Text(". Idle"))
    if grid.bars.num_places > 1:
        items.append(Text("lower case: later stages"))
    return items


def _wrap(items: list[Text], width: int) -> list[Text]:
    """Items side by side, in as many lines as they need."""
    space = Text("   ")
    lines = [items[0]]
    for item in items[1:]:
        if len(lines[-1]) + len(space) + len(item) <= width:
            lines[-1] = lines[-1] + space + item
        else:
            lines.append(item)
    return lines
