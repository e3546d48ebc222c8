"""One self-contained HTML file: timelines to zoom into, and their numbers as tables.

The file needs no network, works from disk, and allows only its own script to run. Its parts are
in this folder; the scripts are joined in dependency order.
"""

from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from string import Template

from penstock.errors import ArgumentError
from penstock.ir.actions import Kind
from penstock.sim.timeline import Timeline
from penstock.sim.waits import find_waits
from penstock.view.html.data import PageData, page_data
from penstock.view.html.document import embed, join_scripts, policy, read_part
from penstock.view.html.tables import (
    difference_section,
    figures_line,
    idle_section,
    rank_section,
    stage_section,
    summary_section,
)
from penstock.view.layout import BUSY_KINDS, LANE_HEIGHT, STRIPS
from penstock.view.palette import IDLE, LOOKS, MEMORY, shade, text_colour

__all__ = ["page"]

_SCRIPTS = (
    "columns",
    "timeline",
    "bars",
    "units",
    "time_window",
    "lanes",
    "density",
    "painting",
    "marks",
    "panel",
    "descriptions",
    "search",
    "moved",
    "sorting",
    "sharing",
    "files",
    "gestures",
    "screen",
    "app",
    "hook",
    "main",
)


def page(timelines: Timeline | Mapping[str, Timeline], *, title: str | None = None) -> str:
    """Return one HTML file with timelines below one another on one time axis.

    Give one timeline, or several by name, such as predicted and recorded. The others are compared
    with the first.

    >>> from penstock.assembly import build
    >>> from penstock.sim.engine import simulate
    >>> text = page(simulate(build("ZBV", ranks=4, microbatches=8)))
    >>> text[:15]
    '<!doctype html>'
    """
    if isinstance(timelines, Timeline):
        timelines = {timelines.schedule.name: timelines}
    if not timelines:
        raise ArgumentError("timelines must not be empty; give at least one")
    waits = {name: find_waits(timeline) for name, timeline in timelines.items()}
    tables = difference_section(timelines) + summary_section(timelines)
    tables += idle_section({name: found.idle for name, found in waits.items()})
    tables += stage_section(timelines) + rank_section(timelines)
    style, script = _style(), join_scripts(f"html/{name}" for name in _SCRIPTS)
    return Template(read_part("html/page.html")).substitute(
        title=escape(_title(timelines) if title is None else title),
        policy=policy(style, script),
        summary=escape(_summary(timelines)),
        style=style,
        panels="\n".join(
            _panel(number, name, timeline)
            for number, (name, timeline) in enumerate(timelines.items())
        ),
        legend=_legend(timelines),
        tables=tables,
        data=_data(timelines, [page_data(name, found) for name, found in waits.items()]),
        script=script,
    )


def _style() -> str:
    return Template(read_part("html/style.css")).substitute(idle=IDLE, memory=MEMORY)


def _title(timelines: Mapping[str, Timeline]) -> str:
    *others, last = timelines
    return f"{', '.join(others)} and {last}" if others else last


def _summary(timelines: Mapping[str, Timeline]) -> str:
    """Return the sizes of the schedules in one line."""
    parts = []
    for name, timeline in timelines.items():
        schedule = timeline.schedule
        actions = len(schedule.rows)
        label = f"{name}: " if len(timelines) > 1 else ""
        parts.append(
            f"{label}{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.microbatches} microbatches, {actions:,} actions"
        )
    return "; ".join(parts)


def _panel(number: int, name: str, timeline: Timeline) -> str:
    label = escape(f"Timeline of {name}: {figures_line(timeline)}. Press ? for keys.")
    return (
        f'<section class="panel"><header><h2>{escape(name)}</h2>'
        f'<p class="figures">{escape(figures_line(timeline))}</p></header>'
        f'<div class="lanes" id="lanes-{number}" tabindex="0" role="application" '
        f'aria-roledescription="timeline" aria-label="{label}"></div></section>'
    )


def _num_local_stages(timelines: Mapping[str, Timeline]) -> int:
    """Return the largest number of stages on one rank."""
    placements = [timeline.schedule.placement for timeline in timelines.values()]
    return max(
        placement.rank_of_stage.count(rank)
        for placement in placements
        for rank in set(placement.rank_of_stage)
    )


def _legend(timelines: Mapping[str, Timeline]) -> str:
    """Return the legend: one key per kind, in the shades of a rank's stages."""
    count = _num_local_stages(timelines)
    kinds = [
        kind
        for kind in BUSY_KINDS
        if any(
            (timeline.end > timeline.start)[timeline.schedule.rows.is_kind(kind)].any()
            for timeline in timelines.values()
        )
    ]
    items = [
        _key(
            "".join(
                f'<rect fill="{shade(kind, at, count)}" x="{at}" width="1" height="1"/>'
                for at in range(count)
            ),
            count,
            f"{LOOKS[kind].letter} {LOOKS[kind].label}",
            kind,
        )
        for kind in kinds
    ]
    items.append(_key('<rect class="key-idle" width="1" height="1"/>', 1, "Idle"))
    held = (
        "bytes" if all(timeline.peak_bytes for timeline in timelines.values()) else "activations"
    )
    key = '<path class="key-memory" d="M0 1V.6H.3V.3H.7V.6H1V1Z"/>'
    items.append(_key(key, 1, f"Memory ({held})"))
    if count > 1:
        items.append("<li>lighter: later stages of a rank</li>")
    if any(timeline.schedule.rows.joined.any() for timeline in timelines.values()):
        items.append("<li>framed: overlapped, forward above</li>")
    return "".join(items)


def _key(boxes: str, width: int, label: str, kind: Kind | None = None) -> str:
    """Return an entry of the legend; the entry of a kind is a button that hides the kind."""
    picture = (
        f'<svg viewBox="0 0 {width} 1" preserveAspectRatio="none" aria-hidden="true">{boxes}</svg>'
    )
    text = picture + escape(label)
    if kind is not None:
        button = f'<button type="button" data-kind="{kind.value}" aria-pressed="true">'
        text = f"{button}{text}</button>"
    return f"<li>{text}</li>"


def _data(timelines: Mapping[str, Timeline], timeline_data: list[PageData]) -> str:
    """Return the data of the scripts."""
    count = _num_local_stages(timelines)
    shades = [[shade(kind, at, count) for at in range(count)] for kind in Kind]
    settings = {
        "lane_height": LANE_HEIGHT,
        "kinds": [
            {
                "text": kind.text,
                "label": LOOKS[kind].label,
                "is_busy": kind in BUSY_KINDS,
                "takes_bytes_first": kind.takes_bytes_first,
                "strip": STRIPS.get(kind),
            }
            for kind in Kind
        ],
        "shades": [[(fill, text_colour(fill)) for fill in fills] for fills in shades],
        "timelines": [asdict(data) for data in timeline_data],
    }
    return embed(settings)
