"""The size of a figure in inches: its panels, one below the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.view.layout import Rectangles

__all__ = ["MARGINS", "PANEL_GAP", "Sheet", "plan_sheet"]

MARGINS = {"left": 0.7, "right": 0.2, "top": 0.4, "bottom": 0.5}
PANEL_GAP = 0.75

# A panel is as wide as its bars need and as high as its lanes need, within these limits.
_PANEL_WIDTHS = (5.5, 15.0)
_TALLEST_PANELS = 14.0
_BAR_WIDTH = 0.26
_LANE = 0.34
_LEGEND_ITEM = (1.35, 0.22)

_POINTS = 72


@dataclass(frozen=True, slots=True)
class Sheet:
    """The sizes of a figure in inches, and the seconds that the width of a panel covers."""

    width: float
    heights: tuple[float, ...]
    lane: float
    legend_columns: int
    legend_height: float
    seconds: float

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the whole figure."""
        around = MARGINS["top"] + MARGINS["bottom"] + self.legend_height
        gaps = PANEL_GAP * (len(self.heights) - 1)
        width = MARGINS["left"] + self.width + MARGINS["right"]
        return width, sum(self.heights) + gaps + around

    @property
    def points_per_second(self) -> float:
        """The width of a second in points."""
        return self.width * _POINTS / self.seconds

    @property
    def points_per_lane(self) -> float:
        """The height of a lane in points."""
        return self.lane * _POINTS


def plan_sheet(
    panels: Sequence[Rectangles],
    num_ranks: Sequence[int],
    *,
    num_labels: int,
    extra_heights: Sequence[float] = (),
) -> Sheet:
    """Choose sizes that leave the median bar room for its number, within the limits of a page.

    The panels with lanes come first, one per set of bars; `extra_heights` are the panels below.
    """
    seconds = max(bars.seconds for bars in panels)
    median = min(
        float(np.median(bars.right - bars.left)) if len(bars) else seconds for bars in panels
    )
    width = float(np.clip(seconds / median * _BAR_WIDTH, *_PANEL_WIDTHS))
    lane = min(_LANE, _TALLEST_PANELS / sum(num_ranks))
    item_width, item_height = _LEGEND_ITEM
    columns = min(int((MARGINS["left"] + width) / item_width), num_labels)
    lines = -(-num_labels // columns)
    heights = (*(lane * ranks for ranks in num_ranks), *extra_heights)
    return Sheet(width, heights, lane, columns, lines * item_height, seconds)
