"""A timeline as a small SVG picture for a page or notebook: ranks down, time across.

A timeline with few bars is drawn bar by bar, each with a tooltip. One with many bars is drawn as
in the terminal: time is divided into columns, and each shows the action that takes most of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from xml.etree.ElementTree import Element, SubElement

from penstock.ir.actions import Kind
from penstock.ir.rows import ABSENT
from penstock.sim.timeline import Timeline
from penstock.units import format_number, format_share, nice_step
from penstock.view.grid import Grid, fill_grid
from penstock.view.layout import LANE_HEIGHT, Rectangles, rectangles
from penstock.view.palette import LOOKS, shade, text_colour

__all__ = ["MAX_BARS", "MAX_RANKS", "is_summarised", "timeline_drawing"]

# With more bars the picture is summarised; ranks beyond the limit are left out.
MAX_BARS = 600
MAX_RANKS = 128

# Pixels: the width of all bars, the space left of and below them, lanes, letters.
_WIDTH, _LEFT, _BELOW = 840.0, 60.0, 38.0
_ALL_LANES, _LANES = 420.0, (3.0, 24.0)
_LETTER, _TEXT = 6.2, 11.0
# The gap between neighbouring bars.
_SEAM = 0.5
_PIXELS_PER_TICK = 80.0
# The most columns of time, and the most cells over all ranks.
_MAX_COLUMNS, _MAX_CELLS = 420, 16_000


@dataclass(frozen=True, slots=True)
class _Scale:
    """The conversion from seconds and ranks to pixels."""

    begin: float
    pixels_per_second: float
    lane: float

    def across(self, time: float) -> float:
        """Return the horizontal position of a time."""
        return round(_LEFT + (time - self.begin) * self.pixels_per_second, 2)

    def down(self, lane: float) -> float:
        """Return the vertical position of a height in lanes; lanes are centred on rank numbers."""
        return round((lane + 0.5) * self.lane, 2)


def is_summarised(timeline: Timeline) -> bool:
    """Whether there are too many bars or ranks to draw each of them."""
    return len(rectangles(timeline)) > MAX_BARS or timeline.schedule.num_ranks > MAX_RANKS


def timeline_drawing(timeline: Timeline, *, seconds: float | None = None) -> Element:
    """Draw a timeline as an `svg` element.

    `seconds` is the time that the full width represents, so that several pictures can share one
    scale; without it, the timeline fills the width.
    """
    bars, num_ranks = rectangles(timeline), min(timeline.schedule.num_ranks, MAX_RANKS)
    lane = min(max(_ALL_LANES / num_ranks, _LANES[0]), _LANES[1])
    width = bars.seconds if seconds is None else max(seconds, bars.seconds)
    scale = _Scale(bars.begin, _WIDTH / width, lane)
    size = (_LEFT + _WIDTH + 2, scale.down(num_ranks - 0.5) + _BELOW)
    picture = _start(timeline, size)
    _draw_lanes(picture, scale, num_ranks)
    if is_summarised(timeline):
        _draw_columns(picture, fill_grid(timeline, _num_columns(num_ranks)), scale, num_ranks)
    else:
        _draw_bars(picture, timeline, bars, scale)
    _draw_axis(picture, width, scale, num_ranks)
    _draw_legend(picture, bars, scale.down(num_ranks - 0.5) + _BELOW - _TEXT)
    return picture


def _num_columns(num_ranks: int) -> int:
    return min(_MAX_COLUMNS, _MAX_CELLS // num_ranks)


def _start(timeline: Timeline, size: tuple[float, float]) -> Element:
    schedule = timeline.schedule
    label = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.microbatches} microbatches, "
        f"end time {format_number(timeline.end_time)} s, "
        f"bubble {format_share(timeline.bubble_rate)}"
    )
    box = f"0 0 {size[0]:g} {size[1]:g}"
    style = f"max-width:{size[0]:g}px;width:100%;font:{_TEXT:g}px sans-serif"
    return Element("svg", viewBox=box, style=style, role="img", attrib={"aria-label": label})


def _draw_lanes(picture: Element, scale: _Scale, num_ranks: int) -> None:
    """Draw idle time, which stays visible wherever no bar covers it, and the rank labels."""
    every = -(-_TEXT // scale.lane)
    for rank in range(num_ranks):
        top, bottom = (scale.down(rank + side * LANE_HEIGHT / 2) for side in (-1, 1))
        # The text colour of the page, so that it suits a dark page as well as a light one.
        look = {"fill": "currentColor", "fill-opacity": "0.08"}
        _box(picture, _LEFT, top, _LEFT + _WIDTH, bottom, look)
        if rank % every == 0:
            down = max(scale.down(rank) + 4, _TEXT - 2)
            _write(picture, f"rank {rank}", 0.0, down, "currentColor")


def _draw_bars(picture: Element, timeline: Timeline, bars: Rectangles, scale: _Scale) -> None:
    """Draw every bar with its tooltip, and its microbatch if it fits."""
    count = bars.num_local_stages
    for bar in range(len(bars)):
        left, right = scale.across(float(bars.left[bar])), scale.across(float(bars.right[bar]))
        top, bottom = scale.down(float(bars.top[bar])), scale.down(float(bars.bottom[bar]))
        colour = shade(Kind(int(bars.kind[bar])), int(bars.local_stage[bar]), count)
        edge = right - _SEAM if right - left > 4 * _SEAM else right
        box = _box(picture, left, top, edge, bottom, {"fill": colour})
        span = timeline.span(int(bars.row[bar]))
        times = (format_number(time - bars.begin) for time in (span.start, span.end))
        SubElement(box, "title").text = f"{span.action}: {' to '.join(times)} s"
        number = str(bars.microbatch[bar])
        fits = len(number) * _LETTER + 2 <= right - left and bottom - top >= _TEXT - 1
        if bars.microbatch[bar] != ABSENT and fits:
            middle, down = (left + right) / 2, (top + bottom) / 2 + 4
            _write(picture, number, middle, down, text_colour(colour)).set("text-anchor", "middle")


def _draw_columns(picture: Element, grid: Grid, scale: _Scale, num_ranks: int) -> None:
    """Draw what takes most of each column of time, as one path per colour."""
    outlines: dict[int, list[str]] = {}
    column = grid.bars.seconds * scale.pixels_per_second / grid.num_columns
    for rank in range(num_ranks):
        halves = zip(grid.upper[rank].tolist(), grid.lower[rank].tolist(), strict=True)
        for (upper, lower), first, last in _runs(list(halves)):
            left, right = _LEFT + column * first, _LEFT + column * last
            for code, above, below in _parts(upper, lower):
                top, bottom = (scale.down(rank + LANE_HEIGHT * side) for side in (above, below))
                outline = _outline(left, top, right - left, bottom - top)
                outlines.setdefault(code, []).append(outline)
    for code, paths in sorted(outlines.items()):
        if code != grid.idle:
            colour = shade(*grid.decode(code), grid.bars.num_local_stages)
            SubElement(picture, "path", fill=colour, d="".join(paths))


def _outline(*sizes: float) -> str:
    """Return a rectangle within a path, from its left, top, width and height."""
    left, top, width, height = (f"{round(size, 1):g}" for size in sizes)
    return f"M{left} {top}h{width}v{height}h-{width}z"


def _parts(upper: int, lower: int) -> list[tuple[int, float, float]]:
    """Return the code and the extent, within -0.5 to 0.5, of each part of a lane."""
    if upper == lower:
        return [(upper, -0.5, 0.5)]
    return [(upper, -0.5, 0.0), (lower, 0.0, 0.5)]


def _runs(cells: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Join equal neighbours: yield what they show, and their first and end column."""
    left = 0
    for cell, run in groupby(cells):
        right = left + sum(1 for _ in run)
        yield cell, left, right
        left = right


def _draw_axis(picture: Element, seconds: float, scale: _Scale, num_ranks: int) -> None:
    step = nice_step(_PIXELS_PER_TICK / scale.pixels_per_second)
    down = scale.down(num_ranks - 0.5) + _TEXT + 2
    for tick in range(int(seconds / step * (1 + 1e-9)) + 1):
        label = format_number(tick * step) + " s" * (tick == 0)
        across = scale.across(scale.begin + tick * step)
        if across + len(label) * _LETTER <= _LEFT + _WIDTH:
            _write(picture, label, across, down, "currentColor")


def _draw_legend(picture: Element, bars: Rectangles, down: float) -> None:
    across = _LEFT
    for kind in bars.kinds:
        look = LOOKS[kind]
        _box(picture, across, down, across + _TEXT, down + _TEXT - 1, {"fill": look.colour})
        _write(picture, look.label, across + _TEXT + 4, down + _TEXT - 2, "currentColor")
        across += _TEXT + 18 + len(look.label) * _LETTER


def _box(
    picture: Element, left: float, top: float, right: float, bottom: float, look: dict[str, str]
) -> Element:
    sizes = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    return SubElement(
        picture, "rect", {key: f"{value:.7g}" for key, value in sizes.items()} | look
    )


def _write(picture: Element, text: str, across: float, down: float, colour: str) -> Element:
    attributes = {"x": f"{across:.7g}", "y": f"{down:.7g}", "fill": colour}
    written = SubElement(picture, "text", attributes)
    written.text = text
    return written
