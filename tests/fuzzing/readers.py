"""Every reader of files: how it reads, writes again, and what commands do with what it read."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.cli.reports import explanation, timeline, to_json
from penstock.costs import Costs
from penstock.dropin.names.lists import read_order, write_order
from penstock.files.flight.timeline import last_recorded_step
from penstock.files.flight.waits import Flight, read_flights
from penstock.files.timeline import read_timeline, write_timeline
from penstock.files.trace.reading import read_trace
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.planner.search.layer_files import LayerCosts, read_layers
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.sim.timeline import Timeline
from penstock.view.html.page import page
from penstock.view.notebook import plan_html, schedule_html, timeline_html
from penstock.view.plan_report import plan_report
from penstock.view.text.flight import flight_view, step_title
from penstock.view.text.timeline import colour_timeline, plain_timeline
from penstock.view.trace import write_trace
from tests.fuzzing import valid_files

__all__ = ["READERS", "Reader"]


@dataclass(frozen=True)
class Reader:
    """One form of file. `content` returns all of a value that must survive writing."""

    ending: str
    read: Callable[[Path], Any]
    write: Callable[[Any, Path], None]
    content: Callable[[Any], object]
    use: Callable[[Any], None]
    valid: tuple[bytes, ...]


def _tell_timeline(found: Timeline) -> object:
    columns = (found.start, found.end, found.memory)
    return found.schedule, [column.tolist() for column in columns]


def _tell_layers(found: LayerCosts) -> object:
    return dict(found.layers), dict(found.transfer)


def _tell_plan(found: Plan) -> object:
    return found.problem, found.schedule, found.schedule.name, found.choices, found.lower_bound


def _write_layers(found: LayerCosts, file: Path) -> None:
    sizes = [
        {
            "microbatch_size": size,
            "layers": [asdict(piece) for piece in pieces],
            "transfer": found.transfer[size],
        }
        for size, pieces in found.layers.items()
    ]
    if file.suffix == ".json":
        file.write_text(json.dumps({"sizes": sizes}), encoding="utf-8")
    else:
        file.write_text(f"sizes = {_to_toml(sizes)}\n", encoding="utf-8")


def _to_toml(value: object) -> str:
    match value:
        case dict():
            return f"{{{', '.join(f'{key} = {_to_toml(item)}' for key, item in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(_to_toml, value))}]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _use_schedule(found: Schedule) -> None:
    schedule_html(found)
    str(found)
    if not find_problems(found):
        lowered = lower(found)
        assert not find_problems(lowered)
        to_json(explanation(explain(lowered)))
        _use_timeline(simulate(found))


def _use_timeline(found: Timeline) -> None:
    json.loads(to_json(timeline(found)), parse_constant=_refuse)
    plain_timeline(found, width=60)
    colour_timeline(found, width=60)
    timeline_html(found)
    page(found).encode()


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} was computed")


def _use_costs(found: Costs) -> None:
    _use_timeline(simulate(build("ZB-H1", ranks=2, microbatches=2), found))


def _use_plan(found: Plan) -> None:
    plan_html(found)
    plan_report(found).encode()


def _use_layers(found: LayerCosts) -> None:
    assert all(sum(piece.seconds for piece in pieces) >= 0 for pieces in found.layers.values())


def _use_order(found: object) -> None:
    str(found)


def _costs(ending: str) -> Reader:
    files = valid_files.cost_files(ending)
    return Reader(ending, Costs.from_file, Costs.to_file, Costs.to_mapping, _use_costs, files)


def _layers(ending: str, files: tuple[bytes, ...]) -> Reader:
    return Reader(ending, read_layers, _write_layers, _tell_layers, _use_layers, files)


def _trace(ending: str, files: tuple[bytes, ...]) -> Reader:
    return Reader(ending, read_trace, write_trace, _tell_timeline, _use_timeline, files)


def _copy_flight(found: Flight, file: Path) -> None:
    (log,) = found.logs.values()
    file.write_bytes(log.path.read_bytes())


def _tell_flight(found: Flight) -> object:
    (log,) = found.logs.values()
    return found.placement, found.schedule, log.rank, log.host, log.last, log.last_time


def _use_flight(found: Flight) -> None:
    flight_view(found)
    step = last_recorded_step(found)
    if step is not None:
        step_title(step).encode()
        _use_timeline(step.timeline)


READERS = {
    "schedule": Reader(
        ".csv",
        Schedule.from_csv,
        Schedule.to_csv,
        lambda found: found,
        _use_schedule,
        valid_files.schedule_files(),
    ),
    "order": Reader(
        ".csv", read_order, write_order, lambda found: found, _use_order, valid_files.order_files()
    ),
    "costs-toml": _costs(".toml"),
    "costs-json": _costs(".json"),
    "layers-toml": _layers(".toml", valid_files.layer_files(".toml")),
    "layers-json": _layers(".json", valid_files.layer_files(".json")),
    "timeline": Reader(
        ".json",
        read_timeline,
        write_timeline,
        _tell_timeline,
        _use_timeline,
        valid_files.timeline_files(),
    ),
    "trace": _trace(".json", valid_files.trace_files(".json")),
    "compressed-trace": _trace(".json.gz", valid_files.trace_files(".json.gz")),
    "profiler-trace": _trace(".json", valid_files.profiler_files()),
    "flight": Reader(
        ".flight",
        lambda file: read_flights([file]),
        _copy_flight,
        _tell_flight,
        _use_flight,
        valid_files.flight_files(),
    ),
    "plan": Reader(
        ".json", Plan.from_file, Plan.to_file, _tell_plan, _use_plan, valid_files.plan_files()
    ),
}
