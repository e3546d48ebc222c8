"""What each rank of a timeline holds over time, as a strip of curves for a picture.

A forward adds its stage's activations when it starts; the backward that frees them does so when
it ends. Heights count microbatches over one rank's share of the model.
"""

from xml.etree.ElementTree import Element, SubElement

import penstock as ps
from penstock.units import format_number
from penstock.view.palette import MEMORY

__all__ = ["memory_drawing"]

_WIDTH, _LEFT, _LANE, _TEXT = 840.0, 60.0, 26.0, 11.0


def memory_drawing(timeline: ps.Timeline, *, seconds: float) -> Element:
    """Draw the microbatches that every rank holds, over `seconds` of time."""
    schedule = timeline.schedule
    height = schedule.num_ranks * _LANE + 4
    box = f"0 0 {_LEFT + _WIDTH + 2:g} {height:g}"
    drawing = Element("svg", viewBox=box, role="img", attrib={"aria-label": "microbatches held"})
    drawing.set(
        "style", f"max-width:{_LEFT + _WIDTH + 2:g}px;width:100%;font:{_TEXT:g}px sans-serif"
    )
    scale = (_LANE - 6) / timeline.peak_microbatches
    for rank in range(schedule.num_ranks):
        ground = (rank + 1) * _LANE
        steps = _held(timeline, rank)
        SubElement(drawing, "path", fill=MEMORY, d=_outline(steps, ground, seconds, scale))
        most = max(held for _, held in steps)
        label = SubElement(drawing, "text", x="0", y=f"{ground - 6:g}", fill="currentColor")
        label.text = f"holds {format_number(most)}"
    return drawing


def _held(timeline: ps.Timeline, rank: int) -> list[tuple[float, float]]:
    """Return when the number of microbatches that a rank holds changes, and to what."""
    share = len(timeline.schedule.placement.stages(rank))
    rows = timeline.schedule.rows
    first, end = int(rows.first[rank]), int(rows.first[rank + 1])
    steps, before = [(0.0, 0.0)], 0.0
    for row in range(first, end):
        span, held = timeline.span(row), float(timeline.held_activations[row]) / share
        if held != before:
            steps.append((span.start if held > before else span.end, held))
            before = held
    return steps


def _outline(steps: list[tuple[float, float]], ground: float, seconds: float, scale: float) -> str:
    """Return the area below the steps, as a path that ends on the ground."""
    path = [f"M{_LEFT:g} {ground:g}"]
    for time, held in steps:
        across = round(_LEFT + time / seconds * _WIDTH, 1)
        path.append(f"H{across:g}V{round(ground - held * scale, 1):g}")
    return "".join([*path, f"V{ground:g}z"])
