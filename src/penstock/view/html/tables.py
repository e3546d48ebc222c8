"""The numbers of a page as HTML tables, for copying, screen readers and use without scripts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from math import isclose

import numpy as np

from penstock.ir.actions import COMPUTE_KINDS, Kind
from penstock.ir.rows import Floats
from penstock.sim.recorded.difference import find_difference, has_same_compute
from penstock.sim.timeline import Timeline
from penstock.sim.waits import Idle
from penstock.units import format_bytes, format_number, format_share
from penstock.view.palette import LOOKS

__all__ = [
    "difference_section",
    "figures_line",
    "idle_section",
    "rank_section",
    "stage_section",
    "summary_section",
]

_MINUS = "\N{MINUS SIGN}"


def figures_line(timeline: Timeline) -> str:
    """Return the three numbers shown beside a timeline's name."""
    number = timeline.peak_microbatches
    held = f"{format_number(number)} microbatch{'es' * (number != 1)}"
    if timeline.peak_bytes:
        held = format_bytes(timeline.peak_bytes)
    seconds, bubble = format_number(timeline.end_time), format_share(timeline.bubble_rate)
    return f"end time {seconds} s · bubble {bubble} · peak {held}"


def summary_section(timelines: Mapping[str, Timeline]) -> str:
    """Compare time, idle time and memory of every timeline with the first."""
    values = list(timelines.values())
    lines = [
        _line("end time s", [timeline.end_time for timeline in values], format_number),
        _line("bubble, all ranks", [t.bubble_rate for t in values], format_share, _points),
        _line("longest span of a rank s", [t.longest_span for t in values], format_number),
        _line(
            "bubble as papers count",
            [t.papers_bubble_rate for t in values],
            format_share,
            _points,
        ),
        _line("peak microbatches", [t.peak_microbatches for t in values], format_number),
    ]
    if any(timeline.peak_bytes for timeline in values):
        lines.append(_byte_line("peak bytes", [t.peak_bytes for t in values]))
    lines += [
        _line(f"{LOOKS[kind].label} s, all ranks", seconds, format_number)
        for kind in (*COMPUTE_KINDS, Kind.RECOMPUTE)
        if any(seconds := [_seconds(timeline, kind) for timeline in values])
    ]
    idle = [sum(timeline.idle_seconds) for timeline in values]
    lines.append(_line("Idle s, all ranks", idle, format_number))
    note = (
        "The end time is from the first start to the end of the last rank, which is what a step "
        "costs if ranks wait for each other; the bubble is the idle share of all ranks in it. "
        "Papers count from the first action of the slowest rank to its last. A microbatch in "
        "memory is one rank's share of its activations. Differences and ratios are to the first."
    )
    if any(timeline.schedule.rows.joined.any() for timeline in values):
        note += " Actions that run together have an equal part of their time each."
    table = _table(_headings(list(timelines)), lines)
    return _section("Numbers", f'{table}<p class="note">{note}</p>')


def difference_section(timelines: Mapping[str, Timeline]) -> str:
    """Say why recorded steps took another time than the first timeline, if that predicts them."""
    first, *others = timelines.items()
    parts = [
        _difference(*first, name, timeline)
        for name, timeline in others
        if first[1].program is not None
        and timeline.program is None
        and has_same_compute(first[1].schedule, timeline.schedule)
    ]
    return _section("Why the step took another time than predicted", "".join(parts)) * bool(parts)


def _difference(first: str, predicted: Timeline, name: str, recorded: Timeline) -> str:
    found = find_difference(predicted, recorded)
    lines = [
        [f"{cause}: {sentence}", _signed(getattr(found, cause), format_number)]
        for cause, sentence in found.sentences.items()
    ]
    lines.append([f"together: {name} less {first}", _signed(found.seconds, format_number)])
    return _table(["cause", "seconds"], lines)


def idle_section(idles: Mapping[str, Idle]) -> str:
    """Show why ranks were idle, summed over ranks, as a bar and a table."""
    kinds = [kind for kind in COMPUTE_KINDS if any(kind in idle.work for idle in idles.values())]
    values = list(idles.values())
    lines = [
        _line(
            f"waiting for {LOOKS[kind].label.lower()}",
            [idle.work.get(kind, 0.0) for idle in values],
            format_number,
        )
        for kind in kinds
    ]
    labels = (
        "waiting for a transfer",
        "pauses, although every input was there",
        "before the first action and after the last",
    )
    columns = zip(*(_others(idle) for idle in values), strict=True)
    others = [
        (label, column[0][0], [seconds for _, seconds in column])
        for label, column in zip(labels, columns, strict=True)
        if any(seconds for _, seconds in column)
    ]
    lines += [_line(label, seconds, format_number) for label, _, seconds in others]
    if not lines:
        return _section("Idle time by reason", "<p>No rank is ever idle.</p>")
    bars = "".join(
        f'<p class="note">{escape(name) if len(idles) > 1 else "all ranks"}</p>{_reason_bar(idle)}'
        for name, idle in idles.items()
    )
    looks = [_look(kind) for kind in kinds] + [look for _, look, _ in others]
    table = _table(_headings(list(idles), "seconds of all ranks"), lines, looks)
    return _section("Idle time by reason", bars + table)


def rank_section(timelines: Mapping[str, Timeline]) -> str:
    """List the stages, busy time and memory of each rank, one table per timeline."""
    tables = "".join(
        f"<h3>{escape(name)}</h3>{_rank_table(timeline)}" for name, timeline in timelines.items()
    )
    content = f"<details><summary>Stages, time and memory of each rank</summary>{tables}</details>"
    return _section("Ranks", content)


def stage_section(timelines: Mapping[str, Timeline]) -> str:
    """Compare the mean time of an action per stage and kind with the first timeline.

    Timelines with different numbers of stages do not compare, so the section is left out.
    """
    if len({timeline.schedule.num_stages for timeline in timelines.values()}) > 1:
        return ""
    means = [_means(timeline) for timeline in timelines.values()]
    keys = sorted(set.intersection(*(set(mean) for mean in means)))
    lines = [
        _line(
            f"stage {stage}, {LOOKS[Kind(kind)].label.lower()}",
            [mean[stage, kind] for mean in means],
            format_number,
        )
        for stage, kind in keys
    ]
    table = _table(_headings(list(timelines), "mean seconds"), lines)
    content = f"<details><summary>Mean time of an action</summary>{table}</details>"
    return _section("Stages", content)


def _seconds(timeline: Timeline, kind: Kind) -> float:
    """Return the total time of all actions of a kind."""
    return float(_shares(timeline)[timeline.schedule.rows.is_kind(kind)].sum())


def _shares(timeline: Timeline) -> Floats:
    """Return the time of each row; the members of an overlap share its time evenly."""
    group = np.cumsum(~timeline.schedule.rows.joined) - 1
    shares: Floats = (timeline.end - timeline.start) / np.bincount(group)[group]
    return shares


def _means(timeline: Timeline) -> dict[tuple[int, int], float]:
    """Return the mean time of an action by stage and kind of compute."""
    rows = timeline.schedule.rows
    compute = rows.is_compute
    key = rows.stage[compute].astype(np.int64) * len(Kind) + rows.kind[compute]
    keys, number = np.unique(key, return_inverse=True)
    seconds = np.bincount(number, _shares(timeline)[compute])
    means = (seconds / np.bincount(number)).tolist()
    return {divmod(code, len(Kind)): mean for code, mean in zip(keys.tolist(), means, strict=True)}


def _rank_table(timeline: Timeline) -> str:
    has_bytes = bool(timeline.peak_bytes)
    headings = ["rank", "stages", "busy s", "idle s", "bubble", "peak activations"]
    busy, idle, bubble = timeline.busy_seconds, timeline.idle_seconds, timeline.rank_bubble_rates
    lines = []
    for rank in range(timeline.schedule.num_ranks):
        cells = [
            str(rank),
            " ".join(map(str, timeline.schedule.placement.stages(rank))),
            format_number(busy[rank]),
            format_number(idle[rank]),
            format_share(bubble[rank]),
            str(timeline.rank_peak_activations[rank]),
        ]
        lines.append([*cells, *([format_bytes(timeline.rank_peak_bytes[rank])] * has_bytes)])
    return _table([*headings, *(["peak bytes"] * has_bytes)], lines)


def _headings(names: Sequence[str], unit: str = "") -> list[str]:
    """Return a column per timeline, plus difference and ratio for all but the first."""
    return [
        unit,
        names[0],
        *(cell for name in names[1:] for cell in (name, "difference", "ratio")),
    ]


def _line(
    label: str,
    values: Sequence[float],
    format_value: Callable[[float], str],
    format_difference: Callable[[float], str] | None = None,
) -> list[str]:
    first = values[0]
    cells = [label, format_value(first)]
    for value in values[1:]:
        more = 0.0 if isclose(value, first) else value - first
        ratio = f"{value / first:.3f}" if first else ""
        cells += [format_value(value), _signed(more, format_difference or format_value), ratio]
    return cells


def _points(share: float) -> str:
    """Return the difference of two percentages, which is not a percentage."""
    return f"{100 * share:.1f} points"


def _byte_line(label: str, values: Sequence[float]) -> list[str]:
    """Return a line of bytes; a timeline may have been recorded or priced without them."""
    if all(values):
        return _line(label, values, format_bytes)
    first, *others = (format_bytes(value) if value else "not known" for value in values)
    return [label, first, *(cell for other in others for cell in (other, "", ""))]


def _signed(value: float, format_value: Callable[[float], str]) -> str:
    sign = _MINUS if value < 0 else "+" if value > 0 else ""
    return sign + format_value(abs(value))


def _table(
    headings: Iterable[str], lines: Sequence[Sequence[str]], looks: Sequence[str] = ()
) -> str:
    """Return a table; lines whose colour a bar above it has come with their looks."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{_swatch(look)}{escape(line[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in line[1:])
        + "</tr>\n"
        for line, look in zip(lines, looks or [""] * len(lines), strict=True)
    )
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="scrolling" tabindex="0" role="group" aria-label="Table">{table}</div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>\n"


def _look(kind: Kind) -> str:
    return f'fill="{LOOKS[kind].colour}"'


def _others(idle: Idle) -> list[tuple[str, float]]:
    """Return the look and the seconds of every reason beside the kinds of work."""
    return [
        ('class="reason-transfer"', idle.transfer),
        ('class="reason-pauses"', idle.pauses),
        ('class="reason-edges"', idle.edges),
    ]


def _swatch(look: str) -> str:
    box = f'<rect {look} width="10" height="10"/>'
    return f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">{box}</svg>' * bool(look)


def _reason_bar(idle: Idle) -> str:
    """Draw the shares of the reasons side by side; the table has the same numbers."""
    parts = [*((_look(kind), value) for kind, value in idle.work.items()), *_others(idle)]
    whole = sum(value for _, value in parts)
    boxes, left = [], 0.0
    for look, value in parts:
        width = 100 * value / whole if whole else 0.0
        boxes.append(f'<rect {look} x="{left:.3f}" width="{width:.3f}" height="1"/>')
        left += width
    return (
        '<svg class="reasons" viewBox="0 0 100 1" '
        f'preserveAspectRatio="none" aria-hidden="true">{"".join(boxes)}</svg>'
    )
