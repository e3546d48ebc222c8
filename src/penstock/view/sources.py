"""Everything that can be viewed, turned into a timeline: schedules, plans, names and files."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from penstock import files
from penstock.assembly import build
from penstock.costs import Costs
from penstock.costs.given import costs_or_unit
from penstock.errors import ArgumentError, ParseError
from penstock.files import flight
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.schedules.registry import FAMILIES
from penstock.sim.comparison import costs_for
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline

__all__ = [
    "Source",
    "is_file",
    "is_flight",
    "price_alike",
    "read_recorded",
    "read_source",
    "timeline_of",
]

# A string is the name of a family, or of a file if it has one of these endings, or of a folder
# with the flight records of a run.
Source: TypeAlias = Schedule | Timeline | Plan | Path | str
_ENDINGS = (".csv", ".json", ".json.gz", ".flight")
_FIRST_KEY = re.compile(r'\s*\{\s*"(\w+)"')
_HEAD_BYTES = 4096
# The first key of a file identifies its kind, in whatever order its keys are written.
_TIMELINE_KEYS = ("name", "schedule", "start", "end", "bytes")
_PLAN_KEYS = ("format", "boundary", "choices", "costs", "memory", "orders", "predicted")


def is_file(source: Path | str) -> bool:
    """Whether a source is the path of a file or folder rather than the name of a family."""
    if isinstance(source, Path) or source.lower().endswith(_ENDINGS):
        return True
    return source not in FAMILIES and (is_flight(source) or _has_other_ending(source))


def is_flight(source: Path | str) -> bool:
    """Whether a source is a flight record, or a folder with the records of a run."""
    path = Path(source)
    return path.name.lower().endswith(".flight") or any(path.glob("*.flight"))


def _has_other_ending(source: str) -> bool:
    """Whether this is a file that nothing reads; what reads it says which endings are read."""
    return Path(source).suffix != "" and Path(source).is_file()


def read_source(path: Path | str) -> Schedule | Plan | Timeline:
    """Read what a file holds.

    That is a schedule (.csv), a plan, a recorded timeline or a trace (.json, .json.gz), or the
    last step in flight records (.flight, or their folder).
    """
    file = Path(path)
    if is_flight(file):
        return read_recorded(file)
    name = file.name.lower()
    if not name.endswith(_ENDINGS):
        raise ArgumentError(
            f"the name of a file must end in {_list(_ENDINGS)} (got {file.name!r})"
        )
    if name.endswith(".csv"):
        return Schedule.from_csv(file)
    if _first_key(file) in _PLAN_KEYS:
        return Plan.from_file(file)
    return read_recorded(file)


def read_recorded(path: Path | str, *more: Path | str, step: int = -1) -> Timeline:
    """Read a recorded timeline, the traces of one or more ranks, or the last step of a flight.

    `step` selects one of several profiled steps of a trace, from 0; -1 is the last.
    """
    if is_flight(path):
        return _read_flight(path, *more)
    key = _first_key(Path(path))
    if key in _PLAN_KEYS:
        raise ParseError(f"{path} must be a recorded timeline or a trace (got a plan)")
    if key in _TIMELINE_KEYS and not more:
        return files.read_timeline(path)
    return files.read_trace(path, *more, step=step)


def _read_flight(*paths: Path | str) -> Timeline:
    found = flight.last_recorded_step(flight.read_flights(paths))
    if found is None:
        raise ParseError(f"{paths[0]} must have a step (got records without a compute action)")
    return found.timeline


def timeline_of(
    source: Source,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
) -> Timeline:
    """Return the timeline of a source: as recorded, as planned, or simulated.

    `ranks` and `microbatches` are for the name of a family; `costs` are those of a simulation,
    unit costs by default. A timeline, or a plan without `costs`, is taken unchanged.
    """
    found = _resolve(source, ranks, microbatches)
    match found:
        case Timeline():
            _refuse_costs(found, costs)
            return found
        case Plan():
            return found.timeline if costs is None else simulate(found.schedule, costs)
        case Schedule():
            return simulate(found, costs)


def price_alike(
    sources: Mapping[str, Source] | Iterable[Source],
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    costs: Costs | None = None,
) -> dict[str, Timeline]:
    """Return timelines by name, with all schedules priced for the same model.

    A single number in `costs` is for one rank's share of the model. Without `costs`, schedules
    are priced with those of the first plan, or else with unit costs.
    """
    sizes = (ranks, microbatches)
    given = list(sources.items()) if isinstance(sources, Mapping) else [("", s) for s in sources]
    if not given:
        raise ArgumentError("sources must not be empty; give at least one schedule or timeline")
    # Sizes are for the names among the sources, if there are any.
    has_names = any(_is_name(source) for _, source in given)
    found = [
        (name, _resolve(source, *((None, None) if has_names and not _is_name(source) else sizes)))
        for name, source in given
    ]
    plans = (item for _, item in found if isinstance(item, Plan))
    shared = costs_or_unit(costs or next((plan.problem.costs for plan in plans), None))
    timelines: dict[str, Timeline] = {}
    for name, item in found:
        timeline = _priced(item, shared)
        timelines[_unused(name or timeline.schedule.name, timelines)] = timeline
    return timelines


def _resolve(
    source: Source, ranks: int | None, microbatches: int | None
) -> Schedule | Plan | Timeline:
    """Build a family by name, or read a file; other sources are returned unchanged."""
    is_name = _is_name(source)
    if not is_name and (ranks is not None or microbatches is not None):
        raise ArgumentError(
            f"ranks and microbatches must be left out unless the source is the name of a family "
            f"(got {_describe(source)}); its sizes are fixed"
        )
    if not isinstance(source, str | Path):
        if not isinstance(source, Schedule | Plan | Timeline):
            raise ArgumentError(
                f"source must be a Schedule, a Timeline, a Plan, the name of a family or a file "
                f"(got {_describe(source)})"
            )
        return source
    if not is_name:
        return read_source(source)
    if ranks is None or microbatches is None:
        raise ArgumentError(
            f"ranks and microbatches are required for the name of a family (got {source!r}); "
            "write ranks=4, microbatches=8"
        )
    return build(str(source), ranks=ranks, microbatches=microbatches)


def _is_name(source: object) -> bool:
    return isinstance(source, str) and not is_file(source)


def _priced(item: Schedule | Plan | Timeline, costs: Costs) -> Timeline:
    if isinstance(item, Timeline):
        return item
    schedule = item.schedule if isinstance(item, Plan) else item
    return simulate(schedule, costs_for(schedule, costs))


def _refuse_costs(timeline: Timeline, costs: Costs | None) -> None:
    if costs is not None:
        raise ArgumentError(
            f"costs must be left out for a timeline (got costs for {timeline.schedule.name}); "
            "simulate its schedule instead"
        )


def _unused(name: str, taken: Mapping[str, object]) -> str:
    """Return the name, with a number behind it if it is taken."""
    copy, free = 2, name
    while free in taken:
        free, copy = f"{name} ({copy})", copy + 1
    return free


def _first_key(file: Path) -> str:
    """Return the first key of a JSON file; the rest may be too large to read for this."""
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    found = _FIRST_KEY.match(head)
    return found[1] if found else ""


def _describe(source: object) -> str:
    return (
        repr(source)
        if isinstance(source, str | Path)
        else f"a value of type {type(source).__name__}"
    )


def _list(endings: Sequence[str]) -> str:
    return f"{', '.join(endings[:-1])} or {endings[-1]}"
