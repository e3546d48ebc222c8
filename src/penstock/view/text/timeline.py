"""Timelines for the terminal: ranks down, time across, one line per rank.

rank 0  F0F1F2F3............B0--      every column is an equal slice of time and shows
rank 1  ..F0F1F2......B0--F3B1--      the action that takes most of it
        |0 s      |5        |10
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from penstock.ir.actions import Kind
from penstock.sim.timeline import Timeline
from penstock.units import format_number, nice_step
from penstock.view.grid import Grid, fill_grid, wide_bars
from penstock.view.palette import LOOKS, shade, text_colour

__all__ = ["TimelinePicture", "colour_timeline", "plain_timeline"]

_HALF_BLOCK = "▀"
_COLUMNS_PER_TICK = 8


@dataclass(frozen=True, slots=True)
class TimelinePicture:
    """A timeline that fits the console it is printed on: its width, and its colours.

    Sixteen colours are too few to tell the kinds of action apart, so it falls back to letters.
    """

    timeline: Timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        has_enough_colours = console.color_system not in (None, "standard")
        is_coloured = console.is_terminal and has_enough_colours and not console.no_color
        draw = colour_timeline if is_coloured else plain_timeline
        yield draw(self.timeline, width=options.max_width)


def colour_timeline(timeline: Timeline, *, width: int) -> Text:
    """Draw a timeline to scale in colour; an overlapped pair has its forward in the upper half."""
    grid = fill_grid(timeline, width - _margin(timeline.schedule.num_ranks))
    count = grid.bars.num_local_stages
    colours = [shade(*grid.decode(code), count) for code in range(grid.idle)]
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


def plain_timeline(timeline: Timeline, *, width: int) -> Text:
    """Draw a timeline to scale in letters: `F3--` is a forward, `F3&&B1` an overlapped pair.

    Later stages of a rank are in lower case.
    """
    grid = fill_grid(timeline, width - _margin(timeline.schedule.num_ranks))
    alphabet = np.array([*(_letter(*grid.decode(code)) for code in range(grid.idle)), "."])
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


def _margin(num_ranks: int) -> int:
    """Return the width of the rank labels, with the space that follows them."""
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
    """Return the style of a cell from the codes of its halves; idle time has no colour."""
    is_busy_above, is_busy_below = above < len(colours), below < len(colours)
    if above == below:
        return f"{text_colour(colours[above])} on {colours[above]}" if is_busy_above else "dim"
    front = colours[above] if is_busy_above else "default"
    return f"{front} on {colours[below]}" if is_busy_below else front


def _letter(kind: Kind, local_stage: int) -> str:
    return LOOKS[kind].letter.lower() if local_stage else LOOKS[kind].letter


def _frame(grid: Grid, lines: list[Text], legend: list[Text], width: int) -> Text:
    """Put rank labels before the lines, and the time axis and the legend below."""
    margin = _margin(grid.num_ranks)
    picture = [Text(f"rank {rank}".ljust(margin)) + line for rank, line in enumerate(lines)]
    below = [Text(_axis(grid)), *_wrap(legend, width - margin)]
    return Text("\n").join([*picture, *(Text(" " * margin) + line for line in below)])


def _axis(grid: Grid) -> str:
    step = nice_step(grid.seconds_per_column * _COLUMNS_PER_TICK)
    axis = ""
    for tick in range(grid.num_columns):
        column = round(tick * step / grid.seconds_per_column)
        label = f"|{format_number(tick * step)}" + " s" * (tick == 0)
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
    if grid.bars.num_local_stages > 1:
        items.append(Text("lighter: later stages"))
    return items


def _plain_legend(grid: Grid) -> list[Text]:
    items = [Text(f"{LOOKS[kind].letter} {LOOKS[kind].label}") for kind in grid.bars.kinds]
    if grid.bars.is_overlapped.any():
        items.append(Text("& Overlapped"))
    items.append(Text(". Idle"))
    if grid.bars.num_local_stages > 1:
        items.append(Text("lower case: later stages"))
    return items


def _wrap(items: list[Text], width: int) -> list[Text]:
    """Lay items out side by side, in as many lines as they need."""
    space = Text("   ")
    lines = [items[0]]
    for item in items[1:]:
        if len(lines[-1]) + len(space) + len(item) <= width:
            lines[-1] = lines[-1] + space + item
        else:
            lines.append(item)
    return lines
