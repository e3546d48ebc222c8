"""The page draws its timeline: rectangles, colours, memory and dependencies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.assembly import lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.sim.waits import find_waits
from penstock.view.html.data import tick_of
from penstock.view.html.page import page
from penstock.view.layout import rectangles
from penstock.view.palette import shade
from tests.browser import Opener, Visit
from tests.covering import all_but_slow
from tests.strategies import every_family
from tests.view.html.pages import COSTS, DESK
from tests.view.timelines import UNEVEN, timeline_of

COLUMNS = ("row", "rank", "kind", "stage", "microbatch", "left", "right", "top", "bottom")


def expected_rectangles(timeline: Timeline) -> dict[str, Any]:
    bars = rectangles(timeline)
    return {
        "stage": timeline.schedule.rows.stage[bars.row],
        **{name: getattr(bars, name) for name in COLUMNS if name != "stage"},
    }


def assert_draws(visit: Visit, at: int, timeline: Timeline) -> None:
    """Check that the page has the rectangles of the timeline, to within half a tick."""
    found, expected = visit.ask("rectangles", at), expected_rectangles(timeline)
    assert list(found) == list(COLUMNS)
    for name in ("row", "rank", "kind", "stage", "microbatch"):
        assert found[name] == expected[name].tolist()
    for name in ("top", "bottom"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-9)
    half_tick = tick_of(timeline) * 0.5001
    for name in ("left", "right"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=half_tick)


def check_sizes(visit_page: Opener, ranks: int) -> None:
    schedules = every_family(ranks, 2 * ranks if ranks < 6 else 8)
    timelines = {
        f"{schedule.name} {price}": simulate(schedule, costs)
        for schedule in schedules
        for price, costs in (("unit", Costs()), ("uneven", UNEVEN))
    }
    visit = visit_page(page(timelines))
    for at, timeline in enumerate(timelines.values()):
        assert_draws(visit, at, timeline)


# A slow test has every number of ranks.
@pytest.mark.parametrize("ranks", [3])
def test_page_draws_every_family(visit_page: Opener, ranks: int) -> None:
    check_sizes(visit_page, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 65))
def test_page_draws_every_family_on_any_number_of_ranks(visit_page: Opener, ranks: int) -> None:
    check_sizes(visit_page, ranks)


def assert_links(visit: Visit, timeline: Timeline) -> None:
    waits = find_waits(timeline)
    graph, opens = waits.graph, timeline.schedule.rows.opening_row()
    needs = [part.tolist() for part in np.split(graph.need, graph.first[1:-1])]
    for row, expected in enumerate(needs):
        slot = int(waits.slot[opens[row]])
        users = [user for user, found in enumerate(needs) if row in found]
        assert visit.ask("links", 0, row) == {
            "needs": expected,
            "waitedFor": -1 if slot < 0 else int(graph.need[slot]),
            "users": sorted(users, key=lambda user: timeline.start[user]),
        }


def test_page_draws_a_lowered_schedule_with_sends(visit_page: Opener) -> None:
    costs = Costs(send=0.25, transfer=0.5, activation_bytes=2**30)
    timeline = simulate(lower(timeline_of("ZBV", 4, 8).schedule, receives=costs), costs)
    visit = visit_page(page(timeline))
    assert_draws(visit, 0, timeline)
    assert_links(visit, timeline)


def test_times_may_start_at_any_offset(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 2, 4)
    late = replace(timeline, start=timeline.start + 1024, end=timeline.end + 1024)
    assert_draws(visit_page(page(late)), 0, late)


def test_timeline_of_zero_length_opens(visit_page: Opener) -> None:
    costs = Costs(forward=0, backward_input=0, backward_weight=0)
    visit = visit_page(page(timeline_of("GPipe", 2, 2, costs)))
    assert visit.ask("rectangles", 0)["row"] == []


@pytest.mark.parametrize("name", all_but_slow(["1F1B", "ZBV", "DualPipe"], ["ZBV"]))
def test_page_has_the_dependencies_and_the_critical_path(visit_page: Opener, name: str) -> None:
    timeline = timeline_of(name, 2, 4, COSTS)
    visit = visit_page(page(timeline))
    assert_links(visit, timeline)
    assert visit.ask("critical", 0) == list(find_waits(timeline).critical_path)


# The colours of the lower canvas at points of the screen.
READ_PIXELS = """points => {
    const canvas = document.querySelector("canvas");
    const {left, top} = canvas.getBoundingClientRect();
    const {data, width} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return points.map(([x, y]) => {
        const at = 4 * (Math.floor(y - top) * width + Math.floor(x - left));
        const channels = [...data.slice(at, at + 3)];
        return "#" + channels.map(channel => channel.toString(16).padStart(2, "0")).join("");
    });
}"""


def test_bars_have_the_colours_of_the_palette(visit_page: Opener) -> None:
    timeline = timeline_of("ZBV", 2, 4, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    bars = rectangles(timeline)
    boxes = [visit.ask("box", 0, row) for row in bars.row.tolist()]
    # Near the upper left corner, away from the number.
    pixels = visit.page.evaluate(READ_PIXELS, [[box["x"] + 2, box["y"] + 2] for box in boxes])
    columns = zip(bars.kind.tolist(), bars.local_stage.tolist(), strict=True)
    assert pixels == [shade(Kind(kind), local_stage, 2) for kind, local_stage in columns]


def test_memory_curve_matches_the_timeline(visit_page: Opener) -> None:
    costs = Costs(activation_bytes=2**30, parameter_bytes=2**31, weight_stash_bytes=2**29)
    timeline = timeline_of("ZB-H1", 3, 6, costs)
    visit = visit_page(page(timeline))
    for rank in range(3):
        spans = timeline.spans(rank)
        assert visit.ask("memory", 0, rank) == [
            [span.start if span.action.kind == 0 else span.end, span.bytes] for span in spans
        ]


# The longest time for which the page was unresponsive since it was opened.
LONGEST_TASK = """() => new Promise(resolve => {
    let longest = 0;
    new PerformanceObserver(list => list.getEntries().forEach(
        entry => { longest = Math.max(longest, entry.duration); }
    )).observe({type: "longtask", buffered: true});
    requestAnimationFrame(() => setTimeout(() => resolve(longest)));
})"""


@pytest.mark.slow
def test_two_hundred_thousand_actions_zoom_without_a_long_task(visit_page: Opener) -> None:
    timeline = timeline_of("ZBV", 64, 521, UNEVEN)
    assert len(timeline.schedule.rows) > 200_000
    visit = visit_page(page(timeline), viewport=DESK)
    visit.page.mouse.move(640, 400)
    visit.page.keyboard.down("Control")
    for _ in range(60):
        visit.page.mouse.wheel(0, -60)
        visit.page.evaluate("() => new Promise(requestAnimationFrame)")
    visit.page.keyboard.up("Control")
    visit.settle()
    left, right = visit.ask("window")
    assert right - left < timeline.end.max() / 100
    assert visit.page.evaluate(LONGEST_TASK) < 200
    assert_draws(visit, 0, timeline)
