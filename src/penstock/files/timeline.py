"""Timelines as JSON files, so that a recorded step can be examined later.

{"name": "1F1B",
 "schedule": ["0F0,0B0", "1F0,1B0"],      one line per rank, as in a schedule's CSV
 "start": [[0.0, 3.0], [1.0, 2.0]],       seconds, one per action of that rank
 "end": [[1.0, 4.0], [2.0, 3.0]],
 "bytes": [[8.0, 0.0], [8.0, 0.0]]}
"""

import json
from pathlib import Path

import numpy as np

from penstock.atomic_files import write_atomically
from penstock.errors import ParseError, ScheduleError
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.ir.text import format_csv, parse_csv
from penstock.sim.timeline import Timeline
from penstock.untrusted import LARGEST_SUM, clean_name, parse_json, quote, read_text, to_quantity

__all__ = ["read_timeline", "write_timeline"]

_COLUMNS = ("start", "end", "bytes")


def write_timeline(timeline: Timeline, path: Path | str) -> None:
    """Write a timeline as a JSON file, which `read_timeline` reads."""
    schedule = timeline.schedule
    columns = zip(_COLUMNS, (timeline.start, timeline.end, timeline.memory), strict=True)
    bounds = schedule.rows.first[1:-1]
    content: dict[str, object] = {
        "name": schedule.name,
        "schedule": format_csv(schedule.orders, schedule.dataflow).splitlines(),
        **{name: [part.tolist() for part in np.split(column, bounds)] for name, column in columns},
    }
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(content[name])}" for name in content)
    write_atomically(path, "{\n" + lines + "\n}\n")


def read_timeline(path: Path | str) -> Timeline:
    """Read a timeline that `write_timeline` wrote; an error names the file."""
    file = Path(path)
    try:
        return _parse(parse_json(read_text(file)))
    except ScheduleError as error:
        raise ParseError(f"{file}: {error}") from error


def _parse(content: object) -> Timeline:
    names = ("name", "schedule", *_COLUMNS)
    if not isinstance(content, dict) or set(content) != set(names):
        raise ParseError(f"a timeline must be an object with the fields {', '.join(names)}")
    name, lines = content["name"], content["schedule"]
    if not isinstance(name, str):
        raise ParseError(f"name must be a string (got {quote(name)})")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ParseError("schedule must be a list of strings, one per rank")
    orders, dataflow = parse_csv("\n".join(lines))
    schedule = Schedule.from_orders(orders, name=clean_name(name), dataflow=dataflow)
    start, end, held = (_parse_column(schedule, column, content[column]) for column in _COLUMNS)
    if (wrong := np.flatnonzero(end < start)).size:
        rank, position = schedule.rows.position(int(wrong[0]))
        action = schedule.rows.action(int(wrong[0]))
        raise ParseError(f"rank {rank}, position {position}, {action} ends before it starts")
    return Timeline(schedule, start, end, held)


def _parse_column(schedule: Schedule, name: str, ranks: object) -> Floats:
    sizes = np.diff(schedule.rows.first).tolist()
    if not isinstance(ranks, list) or len(ranks) != len(sizes):
        raise ParseError(f"{name} must have a list of numbers for each of the {len(sizes)} ranks")
    column = []
    for rank, (values, size) in enumerate(zip(ranks, sizes, strict=True)):
        if not isinstance(values, list) or len(values) != size:
            raise ParseError(
                f"{name} of rank {rank} must have a number for each of its {size} actions"
            )
        for value in values:
            number = to_quantity(value, LARGEST_SUM)
            if number is None:
                raise ParseError(
                    f"{name} of rank {rank} must be numbers from 0 to {LARGEST_SUM:g} "
                    f"(got {quote(value)})"
                )
            column.append(number)
    return np.array(column)
