"""Plans as files: readable JSON, read strictly.

Only orders, costs, memory and choices are read back, and the rest is computed from them. The
prediction is in the file for people.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isinf
from pathlib import Path
from typing import Any

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.errors import PenstockError, PlanError
from penstock.ir.schedule import Schedule
from penstock.planner.limits import count_bytes
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.choices import Choices
from penstock.sim.engine import simulate
from penstock.sim.period import require_boundary
from penstock.untrusted import clean_name, parse_json, quote, read_text, to_quantity

__all__ = ["ROUNDING", "SavedPlan", "format_plan", "read_plan"]

_FORMAT = "penstock plan 2"
_FIELDS = {"format", "name", "boundary", "memory", "costs", "orders", "choices", "predicted"}
# The first format knew one boundary, and had another one among the choices of a search.
_FIRST_FORMAT = "penstock plan 1"
# Bytes are sums of many numbers, so a limit may be exceeded by this share.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The content of a plan file, from which the rest of a plan is computed."""

    problem: SchedulingProblem
    schedule: Schedule
    choices: Choices | None


def format_plan(saved: SavedPlan, predicted: Mapping[str, object]) -> str:
    """Return the text of a plan file."""
    schedule, problem = saved.schedule, saved.problem
    fields: dict[str, object] = {
        "format": _FORMAT,
        "name": schedule.name,
        "boundary": problem.boundary,
        "predicted": predicted,
        "choices": saved.choices and saved.choices.to_mapping(),
        "memory": [None if isinf(limit) else limit for limit in problem.memory],
        "costs": problem.costs.to_mapping(),
        "orders": [" ".join(map(str, order)) for order in schedule.orders],
    }
    return _indent(fields) + "\n"


def read_plan(path: Path) -> SavedPlan:
    """Read and check a plan file; an error names the file and the field."""
    with _naming(str(path)):
        fields = _load(path)
        with _naming("orders"):
            schedule = _read_schedule(fields)
        with _naming("costs"):
            costs = Costs.from_mapping(_mapping(fields["costs"]))
            timeline = simulate(schedule, costs)
        with _naming("boundary"):
            boundary = fields["boundary"]
            require_boundary(boundary)
        with _naming("memory"):
            memory = _read_memory(fields["memory"], schedule.num_ranks)
            problem = SchedulingProblem.of(
                costs, schedule.placement, schedule.microbatches, memory, boundary=boundary
            )
            _check_bytes(timeline.rank_peak_bytes, memory)
        with _naming("choices"):
            choices = _read_choices(fields["choices"], schedule.num_stages)
        return SavedPlan(problem, schedule, choices)


def _load(path: Path) -> dict[str, Any]:
    fields = _mapping(parse_json(read_text(path)))
    if fields.get("format") == _FIRST_FORMAT:
        fields = _update(fields)
    if fields.get("format") != _FORMAT:
        raise PlanError(f"format must be {_FORMAT!r} (got {quote(fields.get('format'))})")
    if wrong := sorted(_FIELDS ^ set(fields)):
        raise PlanError(
            f"field {quote(wrong[0])} is {'missing' if wrong[0] in _FIELDS else 'unknown'}"
        )
    return fields


def _update(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a file in the first format as they are called now."""
    choices, boundary = fields.get("choices"), "papers"
    if isinstance(choices, Mapping) and "is_checked_after" in choices:
        boundary = "nothing" if choices["is_checked_after"] is True else "everything"
        choices = {name: value for name, value in choices.items() if name != "is_checked_after"}
    return {**fields, "format": _FORMAT, "boundary": boundary, "choices": choices}


def _read_schedule(fields: Mapping[str, Any]) -> Schedule:
    orders, name = fields["orders"], fields["name"]
    if not isinstance(orders, list) or not all(isinstance(order, str) for order in orders):
        raise PlanError("write one text per rank, with a space between actions")
    if not isinstance(name, str):
        raise PlanError(f"the name of the schedule must be a string (got {quote(name)})")
    works = [order.split() for order in orders]
    schedule = Schedule.from_orders(works, name=clean_name(name))
    check(schedule)
    return schedule


def _read_memory(value: object, ranks: int) -> list[float]:
    if not isinstance(value, list) or len(value) != ranks:
        raise PlanError(f"write one limit for each of the {ranks} ranks, null for none")
    limits = []
    for item in value:
        limit = inf if item is None else to_quantity(item)
        if limit is None:
            raise PlanError(f"a limit must be a number of bytes or null (got {quote(item)})")
        limits.append(limit)
    return limits


def _check_bytes(peaks: Sequence[float], memory: Sequence[float]) -> None:
    for rank, (peak, limit) in enumerate(zip(peaks, memory, strict=True)):
        if peak > limit * (1 + ROUNDING):
            raise PlanError(
                f"rank {rank} holds {count_bytes(peak)} bytes with these orders and costs, "
                f"{count_bytes(peak - limit)} more than its limit"
            )


def _read_choices(value: object, stages: int) -> Choices | None:
    if value is None:
        return None
    choices = Choices.from_mapping(_mapping(value))
    if len(choices.sizes) != stages:
        raise PlanError(f"sizes has {len(choices.sizes)} values for {stages} stages")
    return choices


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"write names and values in braces (got {type(value).__name__})")
    return value


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Put the place of an error before its message."""
    try:
        yield
    except PenstockError as error:
        raise PlanError(f"{place}: {error}") from error


def _indent(fields: Mapping[str, object]) -> str:
    """Return JSON with a line per field, and a line per item of nested fields."""
    lines = []
    for name, value in fields.items():
        is_nested = isinstance(value, Mapping) or name == "orders"
        lines.append(f"  {json.dumps(name)}: {_spread(value) if is_nested else json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _spread(value: object) -> str:
    if isinstance(value, Mapping):
        items = [f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n  }"
    assert isinstance(value, list), "what is spread is a mapping or a list"
    return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
