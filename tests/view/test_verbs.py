"""The public verbs of `penstock.view`: every source in every view."""

import gzip
import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock import view
from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.files.timeline import write_timeline
from penstock.files.trace.reading import read_trace
from penstock.ir.placement import Placement
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.sim.comparison import compare as compare_schedules
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.html.page import page as html_page
from penstock.view.plan_report import findings_report, plan_report
from penstock.view.text.timeline import plain_timeline
from tests.planner.search.test_findings import make_findings

SCHEDULE = build("1F1B", ranks=2, microbatches=2)
COSTS = Costs(forward=2, transfer=0.5)
SIZES = {"ranks": 2, "microbatches": 2}
PICTURE = """\
rank 0  F0F1....B0--..B1--
rank 1  ..F0B0--F1B1--....
        |0 s      |5
        F Forward
        B Full backward
        . Idle"""


def make_plan() -> Plan:
    return plan(Costs(transfer=0.5), ranks=2, microbatches=3, seconds=0, placement="loop")


@dataclass(frozen=True)
class Given:
    """A source, the arguments that it needs, and the timeline that every view must show."""

    source: Any
    arguments: dict[str, Any]
    timeline: Timeline


def as_name(_: Path) -> Given:
    return Given("1F1B", SIZES, simulate(SCHEDULE))


def as_priced_name(_: Path) -> Given:
    return Given("1F1B", {**SIZES, "costs": COSTS}, simulate(SCHEDULE, COSTS))


def as_schedule(_: Path) -> Given:
    return Given(SCHEDULE, {"costs": COSTS}, simulate(SCHEDULE, COSTS))


def as_timeline(_: Path) -> Given:
    return Given(simulate(SCHEDULE, COSTS), {}, simulate(SCHEDULE, COSTS))


def as_plan(_: Path) -> Given:
    found = make_plan()
    return Given(found, {}, found.timeline)


def as_priced_plan(_: Path) -> Given:
    found = make_plan()
    return Given(found, {"costs": COSTS}, simulate(found.schedule, COSTS))


def as_schedule_file(folder: Path) -> Given:
    SCHEDULE.to_csv(folder / "mine.csv")
    return Given(str(folder / "mine.csv"), {}, simulate(SCHEDULE))


def as_plan_file(folder: Path) -> Given:
    found = make_plan()
    found.to_file(folder / "plan.json")
    return Given(folder / "plan.json", {}, found.timeline)


def as_timeline_file(folder: Path) -> Given:
    timeline = simulate(SCHEDULE, COSTS)
    write_timeline(timeline, folder / "recorded.json")
    return Given(folder / "recorded.json", {}, timeline)


def as_trace_file(folder: Path) -> Given:
    timeline = simulate(SCHEDULE, COSTS)
    view.write_trace(timeline, folder / "step.json.gz")
    return Given(str(folder / "step.json.gz"), {}, timeline)


every_source = pytest.mark.parametrize(
    "make_source",
    [
        as_name,
        as_priced_name,
        as_schedule,
        as_timeline,
        as_plan,
        as_priced_plan,
        as_schedule_file,
        as_plan_file,
        as_timeline_file,
        as_trace_file,
    ],
)
Maker = Callable[[Path], Given]


def without_name(timeline: Timeline) -> str:
    return plain_timeline(timeline, width=60).plain


@every_source
def test_every_source_is_drawn_as_its_timeline(make_source: Maker, tmp_path: Path) -> None:
    given = make_source(tmp_path)
    drawing = view.draw(given.source, **given.arguments, width=60)
    assert str(drawing) == without_name(given.timeline)


@every_source
def test_every_source_has_a_page_and_a_trace(make_source: Maker, tmp_path: Path) -> None:
    given = make_source(tmp_path)
    text = view.page(given.source, **given.arguments, title="mine")
    view.write_trace(given.source, tmp_path / "trace.json", **given.arguments)
    assert text[:15] == "<!doctype html>"
    assert "<title>mine</title>" in text
    assert without_name(read_trace(tmp_path / "trace.json")) == without_name(given.timeline)


def test_drawing_prints_letters_and_its_repr_is_the_picture() -> None:
    drawing = view.draw("1F1B", ranks=2, microbatches=2, width=26)
    assert str(drawing) == repr(drawing) == PICTURE


def test_drawing_follows_the_console_of_rich() -> None:
    console = Console(
        file=io.StringIO(), width=26, force_terminal=True, color_system="truecolor", no_color=False
    )
    with console.capture() as capture:
        console.print(view.draw("1F1B", ranks=2, microbatches=2))
    assert "\x1b[" in capture.get()
    plain = Console(file=io.StringIO(), width=26, color_system=None)
    with plain.capture() as capture:
        plain.print(view.draw("1F1B", ranks=2, microbatches=2))
    assert capture.get().rstrip("\n") == PICTURE


def test_comparison_prices_schedules_for_the_same_model() -> None:
    names = ["1F1B", "ZBV"]
    found = view.compare(names, ranks=4, microbatches=8, costs=COSTS)
    schedules = [build(name, ranks=4, microbatches=8) for name in names]
    expected = compare_schedules(schedules, COSTS)
    assert {name: t.end_time for name, t in found.timelines.items()} == {
        name: t.end_time for name, t in expected.items()
    }


def test_comparison_prints_a_table() -> None:
    assert str(view.compare(["1F1B", "ZBV"], ranks=4, microbatches=8)) == (
        "schedule  end time s  ratio  bubble  peak microbatches\n"
        "1F1B              33  1.000  27.3 %                  4\n"
        "ZBV             25.5  0.773   5.9 %                  4"
    )


def test_comparison_takes_timelines_by_name_and_other_views_take_the_comparison() -> None:
    timelines = {"predicted": simulate(SCHEDULE), "recorded": simulate(SCHEDULE, COSTS)}
    both = view.compare(timelines)
    assert dict(both.timelines) == timelines
    assert view.page(both, title="both") == html_page(timelines, title="both")
    drawn = str(view.draw(both, width=60)).splitlines()
    assert [line for line in drawn if line.endswith(":")] == ["predicted:", "recorded:"]


def test_comparison_mixes_names_with_other_sources() -> None:
    planned = make_plan()
    found = view.compare(["1F1B", planned, simulate(SCHEDULE)], ranks=2, microbatches=3)
    assert [timeline.schedule.microbatches for timeline in found.timelines.values()] == [3, 3, 2]


def test_comparison_numbers_equal_names() -> None:
    found = view.compare([SCHEDULE, simulate(SCHEDULE, COSTS), SCHEDULE])
    assert list(found.timelines) == ["1F1B", "1F1B (2)", "1F1B (3)"]


def test_comparison_with_a_plan_uses_the_costs_of_the_plan() -> None:
    planned = make_plan()
    found = view.compare({"plan": planned, "1F1B": build("1F1B", ranks=2, microbatches=3)})
    costs = planned.problem.costs
    baseline = compare_schedules([build("1F1B", ranks=2, microbatches=3)], costs)["1F1B"]
    assert found.timelines["plan"].end_time == planned.timeline.end_time
    assert found.timelines["1F1B"].end_time == baseline.end_time


def test_plot_has_a_panel_per_timeline() -> None:
    pytest.importorskip("matplotlib")
    one = view.plot("1F1B", ranks=2, microbatches=2)
    both = view.plot(view.compare(["1F1B", "ZBV"], ranks=2, microbatches=2))
    assert one.axes[0].get_title(loc="left") == "1F1B"
    assert [axes.get_title(loc="left") for axes in both.axes] == ["1F1B", "ZBV"]


def test_report_is_that_of_the_plan_or_the_search() -> None:
    planned, findings = make_plan(), make_findings()
    assert view.report(planned) == plan_report(planned)
    assert view.report(findings) == findings_report(findings)


def test_partition_and_findings_are_drawn_as_tables() -> None:
    pieces = [Piece.of_weight("a", 1), Piece.of_weight("b", 1)]
    drawn = str(view.draw(partition(pieces, Placement.loop(2)), width=80))
    assert drawn.splitlines()[-1] == "balance 100.0 %: slowest stage 1 (stage 0), slowest rank 1"
    drawn = str(view.draw(make_findings(), width=120))
    best = "1: fastest; microbatches 6 x 4, layers 2 2x3 2, checkpointed none"
    assert best in drawn.splitlines()


def first_bytes(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("a.png", b"\x89PNG"),
        ("a.svg", b"<?xml"),
        ("a.PDF", b"%PDF"),
        ("a.html", b"<!doctype html>"),
        ("a.txt", b"rank 0  F0"),
        ("a.md", b"# Plan: "),
        ("a.trace.json", b'{"displayTimeUnit"'),
        ("a.trace.json.gz", b'{"displayTimeUnit"'),
    ],
)
def test_ending_selects_the_view(name: str, beginning: bytes, tmp_path: Path) -> None:
    view.save(make_plan(), tmp_path / name)
    assert first_bytes(tmp_path / name).startswith(beginning)


@pytest.mark.parametrize("name", ["both.svg", "both.html", "both.txt"])
def test_comparison_is_saved_by_its_ending(name: str, tmp_path: Path) -> None:
    view.save(view.compare(["1F1B", "ZBV"], ranks=2, microbatches=2), str(tmp_path / name))
    assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: view.save(SCHEDULE, "plan.json"),
            "the name of a view must end in .png, .svg, .pdf, .html, .txt, .trace.json, "
            ".trace.json.gz, .md (got 'plan.json'); to save data use Plan.to_file, "
            "Schedule.to_csv or write_timeline",
        ),
        (
            lambda: view.draw("1F1B", ranks=2),
            "ranks and microbatches are required for the name of a family (got '1F1B'); write "
            "ranks=4, microbatches=8",
        ),
        (
            lambda: view.page(SCHEDULE, ranks=2),
            "ranks and microbatches must be left out unless the source is the name of a family "
            "(got a value of type Schedule); its sizes are fixed",
        ),
        (
            lambda: view.draw(simulate(SCHEDULE), costs=COSTS),
            "costs must be left out for a timeline (got costs for 1F1B); simulate its schedule "
            "instead",
        ),
        (
            lambda: view.page(Path("plan.yaml")),
            "the name of a file must end in .csv, .json, .json.gz or .flight (got 'plan.yaml')",
        ),
        (
            lambda: view.draw(3),  # type: ignore[arg-type]  # what the message is about
            "source must be a Schedule, a Timeline, a Plan, the name of a family or a file "
            "(got a value of type int)",
        ),
        (
            lambda: view.draw(view.compare([SCHEDULE]), ranks=2, costs=COSTS),
            "ranks and costs must be left out for a source that is already priced (got a value "
            "of type Comparison)",
        ),
        (
            lambda: view.save(make_findings(), "a.png"),
            "the findings of a search must be saved as .md (got 'a.png'); save the plan "
            "`findings.best` for a picture",
        ),
        (
            lambda: view.save(SCHEDULE, "a.md"),
            "a report must be of a Plan or the Findings of a search (got a value of type "
            "Schedule); save other sources as .html or .png",
        ),
        (
            lambda: view.save(view.compare([SCHEDULE]), "a.trace.json"),
            "a trace must be of one timeline (got a Comparison); save each one",
        ),
        (
            lambda: view.compare([SCHEDULE], ranks=2, microbatches=2),
            "ranks and microbatches must be left out unless the source is the name of a family "
            "(got a value of type Schedule); its sizes are fixed",
        ),
        (
            lambda: view.compare([]),
            "sources must not be empty; give at least one schedule or timeline",
        ),
        (
            lambda: view.report(SCHEDULE),  # type: ignore[arg-type]  # what the message is about
            "source must be a Plan or the Findings of a search (got a value of type "
            "Schedule); for schedules and timelines use page or draw",
        ),
    ],
)
def test_wrong_arguments_are_rejected_with_advice(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        call()
    assert str(error.value) == message


def test_importing_the_package_loads_neither_matplotlib_nor_torch() -> None:
    code = "import penstock.view, sys; print({'torch', 'matplotlib', 'numba'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"
