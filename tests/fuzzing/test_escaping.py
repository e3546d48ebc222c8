"""Names from files are text in every output: nothing of them becomes a tag or a script."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.untrusted import clean_name
from penstock.view import figure
from penstock.view.html.page import page
from penstock.view.notebook import plan_html, schedule_html, timeline_html
from penstock.view.plan_report import plan_report
from penstock.view.trace import write_trace
from tests.browser import Browser
from tests.covering import all_but_slow
from tests.strategies import examples

HOSTILE = (
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "\"'><svg onload=window.ran=1>",
    "</title></style></h2><iframe srcdoc='<script>parent.ran = 1</script>'>",
    "<!--<script>",
    "\u2028window.ran = 1\u2029//",
    "${title} $script $$ {{7*7}} %s {0}",
    "javascript:window.ran=1",
    "&lt;b&gt; ]]> `<b>` $x^{$ \\frac",
)
ELEMENTS = "".join(HOSTILE[:2])
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30)).map(clean_name)


def named(name: str) -> Schedule:
    return replace(build("1F1B", ranks=2, microbatches=2), name=name)


def timeline_of(name: str) -> Timeline:
    return simulate(named(name))


def plan_of(name: str) -> Plan:
    schedule = named(name)
    return Plan(SchedulingProblem.of(Costs(), schedule.placement, 2), schedule, 1.0)


def outputs(name: str) -> dict[str, str]:
    """Everything that is HTML, or is made into it, with this name in it."""
    timeline = timeline_of(name)
    return {
        "page": page(timeline),
        "pages": page({name: timeline, f"{name}2": timeline}, title=name),
        "schedule": schedule_html(named(name)),
        "broken": schedule_html(replace(Schedule.from_orders([["0B0", "0F0"]]), name=name)),
        "timeline": timeline_html(timeline),
        "plan": plan_html(plan_of(name)),
        "report": plan_report(plan_of(name)),
    }


class Tags(HTMLParser):
    """The tags of a text with the names of their attributes, and whatever else is no text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[object] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))

    def handle_endtag(self, tag: str) -> None:
        self.found.append(tag)

    def handle_comment(self, data: str) -> None:
        self.found.append(data)

    def handle_decl(self, decl: str) -> None:
        self.found.append(decl)


HARMLESS = {kind: Tags(text).found for kind, text in outputs("harmless").items()}


@given(NAMES)
@settings(max_examples=examples(40))
def test_no_name_changes_the_tags(name: str) -> None:
    assert {kind: Tags(text).found for kind, text in outputs(name).items()} == HARMLESS


@given(NAMES)
@settings(max_examples=examples(40))
def test_no_name_changes_the_scripts(name: str) -> None:
    data, script = SCRIPT.findall(page(timeline_of(name)))
    assert script == SCRIPT.findall(page(timeline_of("harmless")))[1]
    assert json.loads(data)["timelines"][0]["name"] == name


@pytest.mark.parametrize("name", HOSTILE)
def test_traces_keep_names_as_text(name: str, tmp_path: Path) -> None:
    write_trace(timeline_of(name), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert json.loads(text)["otherData"]["name"] == name
    assert text.isascii()


@pytest.mark.parametrize("name", HOSTILE)
def test_figures_keep_names_as_text(name: str, tmp_path: Path) -> None:
    # Dollars in the name of a file made matplotlib read it as a formula, and fail.
    figure.save(figure.draw(timeline_of(clean_name(name))), tmp_path / "figure.svg")
    root = ElementTree.parse(tmp_path / "figure.svg").getroot()
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags & {"script", "foreignObject", "image", "a"} == set()


def open_file(browser: Browser, file: Path) -> tuple[str, list[str]]:
    """What a name would have set if it had run, and what the page has asked for."""
    tab = browser.new_page()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    tab.evaluate("window.penstock?.ready")
    ran = tab.evaluate("String(window.ran)")
    tab.close()
    return ran, [url for url in asked if not url.startswith("data:")]


# Opening pages takes seconds: two names in one by default.
@pytest.mark.parametrize("name", all_but_slow([ELEMENTS, *HOSTILE], [ELEMENTS]))
def test_nothing_of_a_name_runs_in_a_browser(name: str, browser: Browser, tmp_path: Path) -> None:
    for kind, text in outputs(name).items():
        file = tmp_path / f"{kind}.html"
        file.write_text(text, encoding="utf-8")
        assert open_file(browser, file) == ("undefined", [file.as_uri()]), kind
