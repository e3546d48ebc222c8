"""Traces of timelines for viewers such as Perfetto (ui.perfetto.dev) and chrome://tracing.

rank 0 (a process)    compute         |0F0|0F1|   |0B0 |
                      communication       >            ^        one arrow per message, from
rank 1                compute             |1F0|1B0 |   |        middle to middle
                      memory          __/~~~~~~~~~\\_

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from penstock.atomic_files import replacing
from penstock.files.trace.own import header_of
from penstock.ir.actions import Kind
from penstock.ir.graph import build_graph
from penstock.ir.rows import ABSENT, Floats, Ints
from penstock.sim.timeline import Timeline
from penstock.view.palette import TRACE_COLOURS
from penstock.view.trace_lanes import TraceLanes, find_lanes

__all__ = ["trace_lines", "write_trace"]

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_Event: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class _Arrows:
    """The source and target rows of the arrows, and the times at which they start and end."""

    source: Ints
    target: Ints
    left: Floats
    arrived: Floats


def write_trace(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline as a trace that `read_trace` reads; a name ending in .gz is compressed."""
    with replacing(path) as file:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "wt", encoding="utf-8") as stream:
            stream.writelines(trace_lines(timeline))


def trace_lines(timeline: Timeline) -> Iterator[str]:
    """Yield the lines of a trace file."""
    fields = {"displayTimeUnit": "ms", **header_of(timeline.schedule)}
    yield json.dumps(fields)[:-1] + ', "traceEvents": [\n'
    between = ""
    for event in _events(timeline):
        yield between + json.dumps(event)
        between = ",\n"
    yield "\n]}\n"


def _events(timeline: Timeline) -> Iterator[_Event]:
    lanes = find_lanes(timeline)
    yield from _names(timeline, lanes)
    yield from _slices(timeline, lanes)
    yield from _counters(timeline)


def _names(timeline: Timeline, lanes: TraceLanes) -> Iterator[_Event]:
    """Yield the names and the order of the processes and threads."""
    placement = timeline.schedule.placement
    for rank in range(timeline.schedule.num_ranks):
        stages = " ".join(map(str, placement.stages(rank)))
        labels = {"name": f"rank {rank}", "labels": f"stages {stages}", "sort_index": rank}
        for key, value in labels.items():
            yield {"ph": "M", "name": f"process_{key}", "pid": rank, "args": {key: value}}
    for lane in lanes.lanes:
        thread = {"pid": lane.rank, "tid": lane.number}
        for key, value in {"name": lane.name, "sort_index": lane.number}.items():
            yield {"ph": "M", "name": f"thread_{key}", **thread, "args": {key: value}}


def _slices(timeline: Timeline, lanes: TraceLanes) -> Iterator[_Event]:
    """Yield every action, followed by the arrow ends attached to it."""
    arrows = _find_arrows(timeline)
    ends: dict[int, list[_Event]] = {}
    sides = (("s", arrows.source, arrows.left), ("f", arrows.target, arrows.arrived))
    for phase, row_of_arrow, moments in sides:
        for number, (row, moment) in enumerate(
            zip(row_of_arrow.tolist(), moments.tolist(), strict=True)
        ):
            ends.setdefault(row, []).append(_arrow_end(phase, number, moment))
    rows = timeline.schedule.rows
    first, rank = rows.first.tolist(), rows.rank_of_row().tolist()
    for row in lanes.rows_by_time.tolist():
        thread = {"pid": rank[row], "tid": int(lanes.of_row[row])}
        yield thread | _slice(timeline, row, row - first[rank[row]])
        yield from (thread | end for end in ends.get(row, ()))


def _arrow_end(phase: str, number: int, moment: float) -> _Event:
    end = {"ph": phase, "name": "message", "cat": "message", "id": number, "ts": _shown(moment)}
    # Without "bp", the viewer attaches the end of an arrow to the following slice.
    return end | ({"bp": "e"} if phase == "f" else {})


def _slice(timeline: Timeline, row: int, position: int) -> _Event:
    """Return one action as a complete event."""
    action = timeline.schedule.rows.action(row)
    start, end = float(timeline.start[row]), float(timeline.end[row])
    numbers = {"stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}
    arguments: _Event = {name: value for name, value in numbers.items() if value is not None}
    arguments |= {"bytes": float(timeline.memory[row]), "start": start, "end": end}
    arguments |= {"row": position}
    if timeline.schedule.rows.joined[row]:
        arguments |= {"joined": True}
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.name.lower(),
        "cname": TRACE_COLOURS[action.kind],
        "ts": _shown(start),
        "dur": _shown(end) - _shown(start),
        "args": arguments,
    }


def _find_arrows(timeline: Timeline) -> _Arrows:
    """Find an arrow from each send to its receive, or from producer to remote consumer.

    An arrow that would go back in time, because the clocks of two ranks differ, is left out.
    """
    schedule = timeline.schedule
    rows, graph = schedule.rows, build_graph(schedule)
    if schedule.has_communication:
        is_receive = rows.is_kind(*_RECEIVES)[graph.need]
        # A row that needs a receive needs the matching send right after it; see ir/graph.py.
        target, source = graph.need[is_receive], graph.need[np.flatnonzero(is_receive) + 1]
    else:
        user = np.repeat(np.arange(len(rows)), np.diff(graph.first))
        is_remote = graph.link != ABSENT
        target, source = user[is_remote], graph.need[is_remote]
    middle = timeline.start + (timeline.end - timeline.start) / 2
    left, arrived = middle[source], np.maximum(middle[source], middle[target])
    keep = arrived <= timeline.end[target]
    return _Arrows(source[keep], target[keep], left[keep], arrived[keep])


def _counters(timeline: Timeline) -> Iterator[_Event]:
    """Yield each change of a rank's memory: in bytes if they are known, else in activations."""
    rows = timeline.schedule.rows
    unit, held = "activations", timeline.held_activations.astype(np.float64)
    if timeline.peak_bytes:
        unit, held = "bytes", timeline.memory
    early = [kind for kind in Kind if kind.takes_bytes_first]
    is_early = rows.is_kind(*early, *_RECEIVES)
    moment = np.where(is_early, timeline.start, timeline.end)
    for rank in range(rows.num_ranks):
        last = None
        of_rank = slice(int(rows.first[rank]), int(rows.first[rank + 1]))
        order = np.argsort(moment[of_rank], kind="stable")
        times, values = moment[of_rank][order].tolist(), held[of_rank][order].tolist()
        for time, value in zip(times, values, strict=True):
            if value != last:
                held_now = {"ts": _shown(time), "args": {unit: value}}
                yield {"ph": "C", "name": "memory", "pid": rank} | held_now
            last = value


def _shown(seconds: float) -> float:
    """Return the microseconds on a viewer's axis, in whole eighths.

    Floating-point numbers represent eighths exactly, even times 1000. With other fractions of a
    microsecond, rounding in the viewers makes neighbours overlap.
    """
    return round(seconds * 8e6) / 8
