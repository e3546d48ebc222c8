"""Schedules, timelines, plans and comparisons in a notebook: numbers and a picture.

A notebook asks its shell how to display a type. The package registers its types with the shell
when it is imported, so that schedules and timelines stay independent of pictures.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from xml.etree.ElementTree import Element, SubElement, tostring

from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.ir.text import format_table
from penstock.planner.plans import Plan
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.units import format_bytes, format_number, format_share
from penstock.view.drawing import Comparison
from penstock.view.svg import MAX_BARS, MAX_RANKS, is_summarised, timeline_drawing

__all__ = [
    "Formatter",
    "comparison_html",
    "join_notebook",
    "plan_html",
    "register_types",
    "schedule_html",
    "timeline_html",
]

# How much is shown of a schedule that cannot be drawn: ranks, and actions of each rank.
_TABLE_RANKS, _TABLE_ROWS = 8, 12


class Formatter(Protocol):
    """The formatter of a notebook's shell for one form, such as text/html."""

    def for_type(self, typ: type, func: Callable[[Any], str]) -> object:
        """Register the function that displays values of a type."""


def join_notebook() -> None:
    """Register our types with the current notebook; do nothing outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        register_types(shell.display_formatter.formatters)


def register_types(formatters: Mapping[str, Formatter]) -> None:
    """Register schedules, timelines, plans and comparisons with the formatters of a shell."""
    html = formatters["text/html"]
    html.for_type(Schedule, schedule_html)
    html.for_type(Timeline, timeline_html)
    html.for_type(Plan, plan_html)
    html.for_type(Comparison, comparison_html)


def schedule_html(schedule: Schedule) -> str:
    """Draw a schedule with unit costs, or say why it cannot be drawn and list its actions."""
    try:
        timeline = simulate(schedule)
    except ScheduleError as error:
        return _as_text(_broken(schedule, error))
    whole = _start(_sizes(schedule), "drawn with unit costs")
    _add_picture(whole, timeline)
    return _as_text(whole)


def timeline_html(timeline: Timeline) -> str:
    """Draw a timeline and list its main numbers."""
    whole = _start(_sizes(timeline.schedule), _numbers(timeline))
    _add_picture(whole, timeline)
    return _as_text(whole)


def plan_html(plan: Plan) -> str:
    """Describe a plan and draw its predicted timeline."""
    heading, *lines = str(plan).splitlines()
    whole = _start(heading, *lines)
    _add_picture(whole, plan.timeline)
    return _as_text(whole)


def comparison_html(comparison: Comparison) -> str:
    """Draw timelines below one another, to one scale, each with its main numbers."""
    whole = Element("div")
    timelines = comparison.timelines.values()
    seconds = max((timeline.end_time for timeline in timelines), default=0.0)
    for name, timeline in comparison.timelines.items():
        SubElement(SubElement(whole, "div"), "strong").text = name
        SubElement(whole, "div").text = _numbers(timeline)
        _add_picture(whole, timeline, seconds)
    return _as_text(whole)


def _start(heading: str, *lines: str) -> Element:
    whole = Element("div")
    SubElement(SubElement(whole, "div"), "strong").text = heading
    for line in lines:
        SubElement(whole, "div").text = line
    return whole


def _sizes(schedule: Schedule) -> str:
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.microbatches} microbatches"
    )


def _numbers(timeline: Timeline) -> str:
    held = f"{format_number(timeline.peak_microbatches)} microbatches"
    if timeline.peak_bytes:
        held = format_bytes(timeline.peak_bytes)
    seconds, bubble = format_number(timeline.end_time), format_share(timeline.bubble_rate)
    return f"end time {seconds} s, bubble {bubble}, peak {held}"


def _add_picture(whole: Element, timeline: Timeline, seconds: float | None = None) -> None:
    whole.append(timeline_drawing(timeline, seconds=seconds))
    if is_summarised(timeline):
        count = len(timeline.schedule.rows)
        note = f"{count:,} actions: each column shows what takes most of its time"
        if timeline.schedule.num_ranks > MAX_RANKS:
            note += f" (first {MAX_RANKS} of {timeline.schedule.num_ranks} ranks)"
        note += f"; up to {MAX_BARS} are drawn one by one, and penstock.view.page shows all"
        SubElement(SubElement(whole, "div"), "em").text = note


def _broken(schedule: Schedule, error: ScheduleError) -> Element:
    whole = _start(_sizes(schedule), f"cannot be drawn: {error}")
    rows = schedule.rows
    sizes = (rows.first[1:] - rows.first[:-1])[:_TABLE_RANKS].tolist()
    begin = [list(rows.works(rank, 0, min(size, _TABLE_ROWS))) for rank, size in enumerate(sizes)]
    SubElement(whole, "pre").text = format_table(begin)
    return whole


def _as_text(whole: Element) -> str:
    # With every tag closed, this is valid HTML as well as XML.
    return tostring(whole, encoding="unicode", short_empty_elements=False)
