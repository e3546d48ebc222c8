"""A plan says what it predicts, and survives being written to a file."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import PlanError
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.choices import Choices
from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary

COSTS = Costs(transfer=0.25, activation_bytes=10, parameter_bytes=100)


def make_plan(family: str = "ZBV", memory: float | None = 300.0) -> Plan:
    schedule = build(family, ranks=2, microbatches=3)
    costs = COSTS.for_each_stage(schedule.num_stages)
    problem = SchedulingProblem.of(costs, schedule.placement, 3, memory)
    return Plan(problem, schedule, lower_bound(problem))


def test_plan_predicts_by_simulation() -> None:
    plan = make_plan()
    timeline = simulate(plan.schedule, COSTS.for_each_stage(4))
    assert plan.seconds == plan.timeline.end_time == timeline.end_time
    assert plan.gap == timeline.end_time / plan.lower_bound - 1


def test_plan_says_whether_it_keeps_the_limit() -> None:
    at = {memory: make_plan(memory=memory).keeps_limit for memory in (None, 300.0, 240.0, 230.0)}
    assert at == {None: True, 300.0: True, 240.0: True, 230.0: False}


def test_plan_of_work_that_takes_no_time_has_no_gap() -> None:
    schedule = build("1F1B", ranks=1, microbatches=1)
    costs = Costs(forward=0, backward_input=0, backward_weight=0)
    assert Plan(SchedulingProblem.of(costs, schedule.placement, 1), schedule, 0.0).gap == 0


def test_plan_prints_as_a_few_lines() -> None:
    plan = make_plan()
    plan = Plan(plan.problem, plan.schedule, 18.0, Choices((2, 2, 1, 3), (1,), 4))
    assert str(plan) == (
        "ZBV: 2 ranks, 4 stages (v), 3 microbatches\n"
        "end time 19.75 s, bubble 8.9 %, "
        "at most 9.7 % above the proven bound of 18 s\n"
        "rank 0 is fullest: 240 B of 300 B\n"
        "layers per stage: 2 2 1 3; checkpointed stages: 1; microbatches of 4"
    )


def test_plan_without_limits_or_bytes_says_less() -> None:
    plan = make_plan(memory=None)
    assert str(plan).splitlines()[2] == "rank 0 holds most: 240 B"
    free = SchedulingProblem.of(Costs(), plan.problem.placement, 3)
    assert len(str(Plan(free, plan.schedule, 18.0)).splitlines()) == 2


@pytest.mark.parametrize("family", [f.name for f in FAMILIES.values() if f.copies == 1])
@pytest.mark.parametrize("memory", [None, 1000.0, (1000.0, inf)])
def test_plan_survives_a_file(family: str, memory: Any, tmp_path: Path) -> None:
    schedule = build(family, ranks=2, microbatches=4)
    problem = SchedulingProblem.of(COSTS, schedule.placement, 4, memory)
    choices = Choices((2,) * schedule.num_stages, (0,), 2)
    plan = Plan(problem, schedule, lower_bound(problem), choices)
    plan.to_file(tmp_path / "plan.json")
    found = Plan.from_file(tmp_path / "plan.json")
    assert (found, found.schedule.name) == (plan, schedule.name)


def test_file_can_be_read_by_people(tmp_path: Path) -> None:
    schedule = build("1F1B", ranks=2, microbatches=2)
    problem = SchedulingProblem.of(Costs(), schedule.placement, 2)
    Plan(problem, schedule, 8.0).to_file(tmp_path / "plan.json")
    lines = (tmp_path / "plan.json").read_text().splitlines()
    assert lines[:10] == [
        "{",
        '  "format": "penstock plan 2",',
        '  "name": "1F1B",',
        '  "boundary": "everything",',
        '  "predicted": {',
        '    "seconds": 9.0,',
        '    "end_time": 9.0,',
        '    "longest_span": 9.0,',
        '    "lower_bound": 8.0,',
        '    "gap": 0.125,',
    ]
    assert lines[-5:] == [
        '  "orders": [',
        '    "0F0 0F1 0B0 0B1",',
        '    "1F0 1B0 1F1 1B1"',
        "  ]",
        "}",
    ]


def test_prediction_in_a_file_is_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = make_plan(memory=None)
    plan.to_file(file)
    fields = json.loads(file.read_text())
    fields["predicted"] = {"lower_bound": 1e9}
    file.write_text(json.dumps(fields))
    assert Plan.from_file(file) == plan


@pytest.mark.parametrize("boundary", ["everything", "gradients", "nothing", "papers"])
def test_file_keeps_the_boundary(boundary: Boundary, tmp_path: Path) -> None:
    plan = make_plan()
    plan = replace(plan, problem=replace(plan.problem, boundary=boundary))
    plan.to_file(tmp_path / "plan.json")
    assert Plan.from_file(tmp_path / "plan.json").problem.boundary == boundary


@pytest.mark.parametrize(
    ("choices", "boundary"),
    [
        (None, "papers"),
        ({"is_checked_after": False}, "everything"),
        ({"is_checked_after": True}, "nothing"),
    ],
)
def test_file_of_the_first_format_has_the_boundary_that_it_was_solved_for(
    choices: dict[str, Any] | None, boundary: Boundary, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    make_plan().to_file(file)
    fields = json.loads(file.read_text())
    del fields["boundary"]
    sizes = {"sizes": [1, 1, 1, 1], "checkpointed": [], "microbatch_size": 1}
    fields |= {"format": "penstock plan 1", "choices": choices and sizes | choices}
    file.write_text(json.dumps(fields))
    assert Plan.from_file(file).problem.boundary == boundary


def cut(fields: dict[str, Any]) -> None:
    fields["orders"][0] = fields["orders"][0].rpartition(" ")[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format="other"), "format must be 'penstock plan 2' (got 'other')"),
        (lambda f: f.pop("costs"), "field 'costs' is missing"),
        (lambda f: f.update(code="1"), "field 'code' is unknown"),
        (lambda f: f.update(name=3), "orders: the name of the schedule must be a string (got 3)"),
        (lambda f: f.update(orders=[]), "orders: the schedule has no compute action"),
        (lambda f: f.update(orders="0F0"), "orders: write one text per rank"),
        (lambda f: f.update(orders=["0F0garbage"]), "orders: not a valid action: '0F0garbage'"),
        (cut, "orders: rank 0, position 16, 0I2: its other half 0W2 is missing"),
        (lambda f: f.update(costs=[]), "costs: write names and values in braces (got list)"),
        (lambda f: f["costs"].update(forward=-1), "costs: forward must be from 0 to 1e+100"),
        (lambda f: f["costs"].update(speed=1), "costs: unknown cost 'speed'"),
        (lambda f: f["costs"].update(forward=[1, 2]), "costs: forward has 2 values"),
        (lambda f: f.update(memory=200), "memory: write one limit for each of the 2 ranks"),
        (lambda f: f.update(memory=[True, None]), "memory: a limit must be a number of bytes"),
        (lambda f: f.update(memory=[200, 210]), "memory: rank 0 needs 220 bytes for one"),
        (lambda f: f.update(memory=[230, None]), "memory: rank 0 holds 240 bytes with these"),
        (lambda f: f.update(boundary="all"), "boundary: boundary must be one of 'everything'"),
        (lambda f: f.update(boundary=[]), "boundary: boundary must be one of 'everything'"),
        (lambda f: f.update(choices=1), "choices: write names and values in braces"),
        (
            lambda f: f.update(
                choices={
                    "sizes": [1],
                    "checkpointed": [],
                    "microbatch_size": 1,
                }
            ),
            "choices: sizes has 1 values for 4 stages",
        ),
    ],
)
def test_bad_file_names_itself_and_the_field(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    make_plan(memory=None).to_file(file)
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))
    with pytest.raises(PlanError) as caught:
        Plan.from_file(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as JSON: Expecting value"),
        ("[" * 100_000, "too many brackets within one another"),
        ("[1]", "write names and values in braces (got list)"),
        ('{"format": NaN}', "NaN is not a valid number"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        (b"\xff\xfe", "not a text file: byte 0 is not UTF-8"),
    ],
)
def test_file_other_than_a_plan_is_refused(
    text: str | bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as caught:
        Plan.from_file(file)
    assert message in str(caught.value)


def test_repr_of_a_plan_is_one_line() -> None:
    assert repr(make_plan()) == (
        "<Plan ZBV: 2 ranks, 4 stages, 3 microbatches, end time 19.75 s, "
        "at most 2.6 % above the bound>"
    )
