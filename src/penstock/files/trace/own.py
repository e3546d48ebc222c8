"""Our own trace files: what `view/trace.py` adds to what viewers need, and how to read it.

{"otherData": {"format": "penstock trace 1", "name": "1F1B", "edges": [[0, 1]], "parts": [0, 1]},
 "traceEvents": [{"ph": "X", "name": "0F0", "pid": 0, "ts": 0, "dur": 333333.25,
                  "args": {"row": 0, "start": 0.0, "end": 0.3333333333333333, "bytes": 8.0}}, ...]}

A process is a rank. `row` counts the rank's rows, and a row that is `joined` runs together with
the one before it. Seconds are exact; the viewer's microseconds are near them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isclose
from typing import Any

import numpy as np

from penstock.errors import ParseError
from penstock.files.trace.events import Event
from penstock.files.trace.spans import ActionSpan, count_of, number_of, read_span
from penstock.ir.actions import Action, Overlap, Work
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.sim.timeline import Timeline
from penstock.untrusted import clean_name, quote

__all__ = ["header_of", "is_own", "own_span", "own_timeline"]

_HEADER = "otherData"
_FORMAT = "penstock trace 1"


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the timeline, as an event describes it."""

    event: int
    rank: int
    row: int
    action: Action
    is_joined: bool
    start: float
    end: float
    bytes: float


def header_of(schedule: Schedule) -> dict[str, object]:
    """Return the fields of a file that hold what is not in its events."""
    flow = schedule.dataflow
    header = {
        "format": _FORMAT,
        "name": schedule.name,
        "edges": [list(edge) for edge in flow.edges],
        "parts": list(flow.parts),
    }
    return {_HEADER: header}


def is_own(fields: Mapping[str, object]) -> bool:
    """Return whether these fields, read before any event, are those of our own trace."""
    header = fields.get(_HEADER)
    found = header.get("format") if isinstance(header, dict) else None
    if isinstance(found, str) and found.startswith("penstock trace") and found != _FORMAT:
        raise ParseError(f"format must be {_FORMAT!r} (got {quote(found)})")
    return found == _FORMAT


def own_span(event: Event) -> ActionSpan | None:
    """Return the action of an event; counters, arrows and names are for viewers."""
    return read_span(event) if event.fields.get("ph") == "X" else None


def own_timeline(fields: Mapping[str, Any], spans: Sequence[ActionSpan]) -> Timeline:
    """Return the timeline from which our own trace was made."""
    rows = sorted(map(_read_row, spans), key=lambda row: (row.rank, row.row))
    if not rows:
        raise ParseError("the trace has no actions")
    header = fields[_HEADER]
    schedule = Schedule.from_orders(
        _orders(rows), name=_name_of(header), dataflow=_dataflow_of(header)
    )
    start, end, held = (
        np.array([getattr(row, column) for row in rows]) for column in ("start", "end", "bytes")
    )
    return Timeline(schedule, start, end, held)


def _read_row(span: ActionSpan) -> _Row:
    arguments = span.arguments
    try:
        is_joined = arguments.get("joined", False)
        if not isinstance(is_joined, bool):
            raise ParseError(f"joined must be true or left out (got {quote(is_joined)})")
        start, end = number_of(arguments, "start"), number_of(arguments, "end")
        for shown, seconds in ((span.start, start), (span.end, end)):
            if not isclose(shown, seconds * 1e6, rel_tol=1e-9, abs_tol=1.0):
                raise ParseError(
                    "ts and dur must agree with args "
                    f"({shown:.12g} microseconds, {seconds:.12g} s)"
                )
        if end < start:
            raise ParseError(f"{span.action} ends before it starts")
        row, held = count_of(arguments, "row"), number_of(arguments, "bytes")
    except ParseError as error:
        raise ParseError(f"event {span.number}: {error}") from error
    return _Row(span.number, span.process, row, span.action, is_joined, start, end, held)


def _orders(rows: Sequence[_Row]) -> list[list[Work]]:
    orders = []
    for rank, (process, of_rank) in enumerate(groupby(rows, key=lambda row: row.rank)):
        if process != rank:
            raise ParseError(f"process {rank} has no event; processes must be numbered from 0")
        orders.append(list(_works(list(of_rank))))
    return orders


def _works(rows: Sequence[_Row]) -> Iterator[Work]:
    """Return one rank's rows as actions and overlaps."""
    group: list[Action] = []
    for place, row in enumerate(rows):
        if row.row != place:
            state = "appears twice" if row.row < place else "has no event before this one"
            raise ParseError(
                f"event {row.event}: row {min(row.row, place)} of process {row.rank} {state}"
            )
        if row.is_joined and not group:
            raise ParseError(f"event {row.event}: a joined row must follow another row")
        if not row.is_joined and group:
            yield _work(group)
            group = []
        group.append(row.action)
    yield _work(group)


def _work(group: Sequence[Action]) -> Work:
    return group[0] if len(group) == 1 else Overlap(tuple(group))


def _name_of(header: Mapping[str, Any]) -> str:
    name = header.get("name")
    if not isinstance(name, str):
        raise ParseError(f"name in {_HEADER} must be a string (got {quote(name)})")
    return clean_name(name)


def _dataflow_of(header: Mapping[str, Any]) -> Dataflow:
    edges, parts = header.get("edges"), header.get("parts")
    if not isinstance(parts, list) or not all(type(part) is int for part in parts):
        raise ParseError(f"parts in {_HEADER} must be whole numbers, one per stage")
    if not isinstance(edges, list) or not all(map(_is_edge, edges)):
        raise ParseError(f"edges in {_HEADER} must be pairs of stages")
    return Dataflow(len(parts), [(producer, consumer) for producer, consumer in edges], parts)


def _is_edge(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(end) is int for end in value)
