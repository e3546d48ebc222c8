"""A curve of time against memory: for the terminal, and as a figure (which needs matplotlib)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.errors import MissingDependencyError
from penstock.planner.curves import MemoryCurve
from penstock.sim.period import name_seconds
from penstock.units import format_bytes
from penstock.view.palette import INK, MEMORY, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["curve_figure", "curve_view"]

_INCHES = (6.0, 3.6)
_TEXT_SIZE = 8.0
_BAR = 40


def curve_view(curve: MemoryCurve) -> RenderableType:
    """Return the numbers of a curve, and a bar for each limit with the bound marked in it."""
    most = max(point.seconds for point in curve.points)
    bars = []
    for point in curve.points:
        length = round(_BAR * point.seconds / most) if most else 0
        proven = min(length, round(_BAR * point.lower_bound / most)) if most else 0
        label = format_bytes(point.memory).rjust(10)
        bars.append(Text(f"{label}  {'=' * proven}{'-' * (length - proven)}"))
    note = Text("= no order is faster   - what a better order could save at most")
    return Group(Text(str(curve)), Text(), *bars, note)


def curve_figure(curve: MemoryCurve) -> Figure:
    """Draw seconds against bytes per rank, with the proven bound as a second curve."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "drawing needs matplotlib; run pip install 'penstock[figure]'"
        ) from error
    figure = Figure(figsize=_INCHES, facecolor=PAPER, layout="constrained")
    axes = figure.add_subplot()
    memory = [point.memory for point in curve.points]
    seconds, bounds = (
        [getattr(point, name) for point in curve.points] for name in ("seconds", "lower_bound")
    )
    axes.fill_between(memory, bounds, seconds, color=MEMORY, alpha=0.25, linewidth=0)
    axes.plot(memory, seconds, color=INK, marker="o", markersize=3, label="planned")
    axes.plot(memory, bounds, color=MEMORY, linestyle="--", label="no order is faster")
    axes.set_xlabel("memory of a rank", fontsize=_TEXT_SIZE)
    axes.set_ylabel(f"{name_seconds(curve.boundary)} s", fontsize=_TEXT_SIZE)
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(max(value, 0.0)))
    axes.tick_params(labelsize=_TEXT_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=_TEXT_SIZE, frameon=False)
    return figure
