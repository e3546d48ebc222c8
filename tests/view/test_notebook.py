"""Schedules, timelines, plans and comparisons in a notebook, parsed as a browser would."""

import builtins
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.drawing import Comparison
from penstock.view.notebook import (
    comparison_html,
    plan_html,
    register_types,
    schedule_html,
    timeline_html,
)
from penstock.view.verbs import compare, draw
from tests.tables import read_schedule

HOSTILE = '<script>alert("&")</script>'


class Reader(HTMLParser):
    """The tags and texts of a snippet; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._open.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "svg" not in self._open:
            self.texts.append(data)


@dataclass
class Formatters:
    """The formatter of a shell: one function per type."""

    functions: dict[type, Callable[[Any], str]] = field(default_factory=dict)

    def for_type(self, typ: type, func: Callable[[Any], str]) -> object:
        self.functions[typ] = func
        return None

    def show(self, value: object) -> str:
        return self.functions[type(value)](value)


def make_plan() -> Plan:
    return plan(Costs(activation_bytes=8), ranks=2, microbatches=4, seconds=0)


def test_types_are_registered_with_the_formatter_of_a_shell() -> None:
    html = Formatters()
    register_types({"text/html": html})
    schedule = build("1F1B", ranks=2, microbatches=4)
    assert html.show(schedule) == schedule_html(schedule)
    assert html.show(simulate(schedule)) == timeline_html(simulate(schedule))
    assert html.show(make_plan()) == plan_html(make_plan())
    both = Comparison({"a": simulate(schedule)})
    assert html.show(both) == comparison_html(both)
    assert set(html.functions) == {Schedule, Timeline, Plan, Comparison}


def test_schedule_is_drawn_with_unit_costs() -> None:
    found = Reader(schedule_html(build("ZBV", ranks=2, microbatches=4)))
    assert found.texts == ["ZBV: 2 ranks, 4 stages, 4 microbatches", "drawn with unit costs"]
    assert found.tags == {"div", "strong", "svg", "rect", "title", "text"}


def test_timeline_lists_its_numbers() -> None:
    schedule = build("1F1B", ranks=4, microbatches=8)
    assert Reader(timeline_html(simulate(schedule))).texts == [
        "1F1B: 4 ranks, 4 stages, 8 microbatches",
        "end time 33 s, bubble 27.3 %, peak 4 microbatches",
    ]
    timeline = simulate(schedule, Costs(activation_bytes=2**30))
    assert Reader(timeline_html(timeline)).texts[1] == "end time 33 s, bubble 27.3 %, peak 4 GiB"


def test_plan_has_the_same_text_as_when_printed() -> None:
    found = make_plan()
    assert Reader(plan_html(found)).texts == str(found).splitlines()


def test_comparison_draws_every_timeline_to_one_scale() -> None:
    names = ("1F1B", "ZBV")
    timelines = {name: simulate(build(name, ranks=2, microbatches=4)) for name in names}
    text = comparison_html(Comparison(timelines))
    assert Reader(text).texts == [
        "1F1B",
        "end time 15 s, bubble 20.0 %, peak 2 microbatches",
        "ZBV",
        "end time 12.5 s, bubble 4.0 %, peak 2 microbatches",
    ]
    axes = [re.findall(r">(\d+)<", part)[-1] for part in text.split("</svg>")[:2]]
    assert axes[0] == axes[1]


def test_large_timelines_are_summarised_with_a_note() -> None:
    found = Reader(timeline_html(simulate(build("GPipe", ranks=150, microbatches=4))))
    assert found.texts[2] == (
        "1,200 actions: each column shows what takes most of its time (first 128 of 150 ranks); "
        "up to 600 are drawn one by one, and penstock.view.page shows all"
    )
    assert "path" in found.tags


def test_schedule_with_a_deadlock_is_shown_as_a_table() -> None:
    schedule = read_schedule("""
        0F0 0B0
        1B0 1F0
    """)
    found = Reader(schedule_html(schedule))
    with pytest.raises(ScheduleError) as error:
        simulate(schedule)
    assert found.texts == [
        "custom: 2 ranks, 2 stages, 1 microbatches",
        f"cannot be drawn: {error.value}",
        "   rank 0  rank 1\n0  0F0     1B0\n1  0B0     1F0",
    ]


def test_large_schedule_with_a_deadlock_shows_only_its_beginning() -> None:
    orders = [[f"{rank}B{number}" for number in range(500)] for rank in range(40)]
    found = Reader(schedule_html(Schedule.from_orders(orders)))
    table = found.texts[2].splitlines()
    assert len(table) == 1 + 12
    assert table[0].split() == " ".join(f"rank {rank}" for rank in range(8)).split()


@pytest.mark.parametrize("is_broken", [False, True])
def test_names_are_escaped(is_broken: bool) -> None:
    orders = [["0B0", "0F0"] if is_broken else ["0F0", "0B0"]]
    schedule = Schedule.from_orders(orders, name=HOSTILE)
    snippets = [schedule_html(schedule)]
    if not is_broken:
        named = make_plan()
        named = replace(named, schedule=replace(named.schedule, name=HOSTILE))
        snippets += [timeline_html(simulate(schedule)), plan_html(named)]
    for snippet in snippets:
        found = Reader(snippet)
        assert found.texts[0].startswith(f"{HOSTILE}: ")
        assert "script" not in found.tags
        assert "<script" not in snippet


IN_A_NOTEBOOK = """
import sys, types

class Formatter:
    def __init__(self):
        self.types = []
    def for_type(self, typ, func):
        self.types.append(typ.__name__)

html = Formatter()
display = types.SimpleNamespace(formatters={"text/html": html})
shell = types.SimpleNamespace(display_formatter=display)
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: shell if sys.argv[1] == "shell" else None
import penstock
print(*html.types)
"""


@pytest.mark.parametrize(
    ("mode", "expected"), [("shell", "Schedule Timeline Plan Comparison"), ("library", "")]
)
def test_importing_the_package_in_a_notebook_registers_its_types(mode: str, expected: str) -> None:
    # IPython is not a dependency, so a minimal stand-in replaces it.
    command = [sys.executable, "-c", IN_A_NOTEBOOK, mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == expected


class ZMQInteractiveShell:
    """What Rich takes for the shell of a notebook: it looks at the name of the class."""


def test_text_in_a_notebook_is_the_text_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rich displayed tables below the cell by itself, and left the text of draw, str and repr
    # empty.
    compared = compare(["1F1B", "ZBV"], ranks=2, microbatches=4)
    drawn = draw("1F1B", ranks=2, microbatches=2, width=60)
    texts = str(compared), repr(compared), str(drawn)
    assert all(texts)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert (str(compared), repr(compared), str(drawn)) == texts
