"""How schedules, timelines and plans look in a notebook: a line of numbers and a picture.

Notebooks ask their shell how a type looks. We tell the shell, if there is one, when the package
is imported; so neither schedules nor timelines know of pictures.
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
from penstock.view.svg import MOST_BARS, MOST_RANKS, is_summarised, timeline_drawing
from penstock.view.units import format_bytes, format_number, format_share

__all__ = ["Formatter", "join_notebook", "plan_html", "schedule_html", "show_in", "timeline_html"]

# So much is shown of a schedule that cannot be drawn: ranks, and actions of each.
_FEW_RANKS, _FEW_ROWS = 8, 12


class Formatter(Protocol):
    """What a notebook's shell has for each form, such as text/html."""

    def for_type(self, typ: type, func: Callable[[Any], str]) -> object:
        """Let values of a type be shown as this function says."""


def join_notebook() -> None:
    """Let the notebook that imports us show our values; nothing happens where there is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        show_in(shell.display_formatter.formatters)


def show_in(formatters: Mapping[str, Formatter]) -> None:
    """Tell a shell's formatters how schedules, timelines and plans look."""
    html = formatters["text/html"]
    html.for_type(Schedule, schedule_html)
    html.for_type(Timeline, timeline_html)
    html.for_type(Plan, plan_html)


def schedule_html(schedule: Schedule) -> str:
    """A schedule drawn with unit costs, or why that is not possible and how it begins."""
    try:
        timeline = simulate(schedule)
    except ScheduleError as error:
        return _as_text(_broken(schedule, error))
    whole = _start(_sizes(schedule), "priced with unit costs")
    _add_picture(whole, timeline)
    return _as_text(whole)


def timeline_html(timeline: Timeline) -> str:
    """A timeline with its numbers."""
    whole = _start(_sizes(timeline.schedule), _numbers(timeline))
    _add_picture(whole, timeline)
    return _as_text(whole)


def plan_html(plan: Plan) -> str:
    """A plan: what it says of itself, and its prediction."""
    heading, *lines = str(plan).splitlines()
    whole = _start(heading, *lines)
    _add_picture(whole, plan.timeline)
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
    makespan, bubble = format_number(timeline.makespan), format_share(timeline.bubble_rate)
    return f"makespan {makespan}, bubble {bubble}, peak {held}"


def _add_picture(whole: Element, timeline: Timeline) -> None:
    whole.append(timeline_drawing(timeline))
    if is_summarised(timeline):
        note = (
            f"{len(timeline.schedule.rows):,} actions: each column of time shows what takes most"
        )
        if timeline.schedule.num_ranks > MOST_RANKS:
            note += f", for the first {MOST_RANKS} of {timeline.schedule.num_ranks} ranks"
        note += f"; up to {MOST_BARS} are drawn one by one, and penstock.view.page.html shows all"
        SubElement(SubElement(whole, "div"), "em").text = note


def _broken(schedule: Schedule, error: ScheduleError) -> Element:
    whole = _start(_sizes(schedule), f"cannot be drawn: {error}")
    rows = schedule.rows
    sizes = (rows.first[1:] - rows.first[:-1])[:_FEW_RANKS].tolist()
    begin = [list(rows.works(rank, 0, min(size, _FEW_ROWS))) for rank, size in enumerate(sizes)]
    SubElement(whole, "pre").text = format_table(begin)
    return whole


def _as_text(whole: Element) -> str:
    # With every tag closed, this is HTML as well as XML.
    return tostring(whole, encoding="unicode", short_empty_elements=False)
