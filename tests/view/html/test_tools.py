"""What a page offers beside the picture: truthful hovering, ranges, filters, sorting, files."""

from pathlib import Path

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.view.html.page import page
from tests.browser import Opener
from tests.view.html.pages import COSTS, DESK, find_row, point_at, press, text_of
from tests.view.timelines import timeline_of


def compared() -> str:
    return page(compare([build(name, ranks=2, microbatches=4) for name in ("1F1B", "ZB-H1")]))


def test_memory_curve_and_gaps_name_what_the_rank_really_does(visit_page: Opener) -> None:
    # Below a bar, the page once said that its busy rank was idle.
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    box = visit.ask("box", 0, find_row(timeline, "1F0"))
    middle, bottom = box["x"] + box["width"] / 2, box["y"] + box["height"]
    visit.page.mouse.move(middle, bottom + 1)
    assert text_of(visit, "#tip").startswith("1F0 Forward, rank 1")
    visit.page.mouse.move(middle, bottom + 16)
    held, where = text_of(visit, "#tip").splitlines()
    assert held == "holds 1 activation"
    assert where.startswith("rank 1 at 1.7")
    assert where.endswith("; runs 1F0")


def test_a_gap_that_a_copy_to_the_host_makes_names_the_copy(visit_page: Opener) -> None:
    # The gap named only what came next, as if the rank were idle without a reason.
    order = ["0F0", "0OFFLOAD0", "0F1", "0RELOAD0", "0B0", "0B1"]
    costs = Costs(activation_bytes=8, host_link=4)
    timeline = simulate(Schedule.from_orders([order]), costs)
    visit = visit_page(page(timeline), viewport=DESK)
    box = visit.ask("box", 0, find_row(timeline, "0F1"))
    visit.page.mouse.move(box["x"] - 8, box["y"] + box["height"] / 2)
    begin = f"{timeline.span(find_row(timeline, '0F1')).start:g}"
    assert text_of(visit, "#tip") == f"idle until {begin} s\n0F1 waits until 0OFFLOAD0 is done"


def test_after_its_last_action_a_rank_is_done(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    box = visit.ask("box", 0, find_row(timeline, "3B7"))
    visit.page.mouse.move(box["x"] + box["width"] + 20, box["y"] + 5)
    end = f"{timeline.end_time:g}"
    assert text_of(visit, "#tip") == f"done\nidle until the step ends at {end} s"


def test_wheel_alone_scrolls_the_page(visit_page: Opener) -> None:
    visit = visit_page(compared(), viewport={"width": 1280, "height": 400})
    before = visit.ask("window")
    point_at(visit, 0)
    visit.page.mouse.wheel(0, 200)
    visit.page.wait_for_function("() => scrollY > 0")
    assert visit.ask("window") == before


def test_dragging_with_shift_or_on_the_axis_zooms_to_a_range(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    for is_axis in (True, False):
        visit = visit_page(page(timeline), viewport=DESK)
        first, last = (visit.ask("box", 0, find_row(timeline, text)) for text in ("3F2", "3F4"))
        y = first["y"] + first["height"] / 2
        if is_axis:
            y = visit.page.locator("#lanes-0").bounding_box()["y"]  # type: ignore[index]  # it is shown
            y += visit.page.locator("#lanes-0").bounding_box()["height"] - 8  # type: ignore[index]  # it is shown
        else:
            visit.page.keyboard.down("Shift")
        visit.page.mouse.move(first["x"], y)
        visit.page.mouse.down()
        visit.page.mouse.move(last["x"], y, steps=4)
        visit.page.mouse.up()
        visit.settle()
        starts = [timeline.start[find_row(timeline, text)] for text in ("3F2", "3F4")]
        assert visit.ask("window") == pytest.approx(starts, abs=0.05)


def test_legend_hides_a_kind_and_hovering_still_finds_it(visit_page: Opener) -> None:
    timeline = timeline_of("ZB-H1", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    button = visit.page.get_by_role("button", name="W Backward weight")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    row = find_row(timeline, "1W3")
    point_at(visit, row)
    assert text_of(visit, "#tip").startswith("1W3 Backward weight, rank 1")


def test_tables_are_sorted_by_a_heading(visit_page: Opener) -> None:
    visit = visit_page(page(timeline_of("1F1B", 4, 8, COSTS)), viewport=DESK)
    visit.page.locator("summary", has_text="Stages, time and memory").click()
    heading = visit.page.get_by_role("button", name="peak activations")
    heading.click()
    table = visit.page.locator("table", has=heading)
    ranks = table.locator("tbody tr > :first-child")
    assert ranks.all_inner_texts() == ["3", "2", "1", "0"]
    assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    heading.click()
    assert ranks.all_inner_texts() == ["0", "1", "2", "3"]


def test_moved_actions_are_lit_and_counted(visit_page: Opener) -> None:
    before, after = (timeline_of(name, 2, 4) for name in ("1F1B", "ZB-H1"))
    visit = visit_page(page({"before": before, "after": after}), viewport=DESK)
    visit.page.locator("#moved").click()
    # Both have the forwards; the backwards of one are split.
    forwards = [f"{stage}F{microbatch}" for stage in range(2) for microbatch in range(4)]
    moved = {
        find_row(after, text)
        for text in forwards
        if before.start[find_row(before, text)] != after.start[find_row(after, text)]
    }
    assert 0 < len(moved) < len(forwards)
    assert set(visit.ask("marks", 1)["lit"]) == moved
    assert text_of(visit, "#status").startswith(
        f"after: {len(moved)} of the 8 actions in both have moved; the furthest: "
    )
    press(visit, "Escape")
    assert visit.ask("marks", 1)["lit"] == []


def test_address_holds_what_is_shown(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    press(visit, "+", "c", "m")
    point_at(visit, find_row(timeline, "2F3"))
    visit.page.mouse.down()
    visit.page.mouse.up()
    visit.page.get_by_role("button", name="F Forward").click()
    state = visit.ask("window"), visit.ask("marks", 0)
    press(visit, "s")
    visit.page.wait_for_function("() => location.hash !== ''")
    address = visit.page.url
    visit.page.goto("about:blank")
    visit.page.goto(address)
    visit.page.evaluate("penstock.ready")
    window, marks = visit.ask("window"), visit.ask("marks", 0)
    assert window == pytest.approx(state[0])
    assert marks | {"hovered": -1} == state[1] | {"hovered": -1}
    assert visit.page.locator("#memory").get_attribute("aria-pressed") == "false"
    hidden = visit.page.get_by_role("button", name="F Forward")
    assert hidden.get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_pictures_are_saved_as_png_and_svg(name: str, visit_page: Opener, tmp_path: Path) -> None:
    visit = visit_page(page(timeline_of(name, 4, 8, COSTS)), viewport=DESK)
    for suffix, start in (("png", b"\x89PNG\r\n"), ("svg", b"<svg ")):
        with visit.page.expect_download() as download:
            visit.page.locator(f"#save-{suffix}").click()
        target = tmp_path / f"picture.{suffix}"
        download.value.save_as(target)
        assert target.read_bytes().startswith(start)
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert text.count("<g ") == text.count("</g>")
    # Background, lanes, zero lines of memory, bars.
    bars = len(timeline_of(name, 4, 8, COSTS).schedule.rows)
    assert text.count("<rect") == 1 + 4 + 4 + bars


def test_tables_of_a_comparison_fit_the_page(visit_page: Opener) -> None:
    names = ("1F1B", "ZB-H1", "ZBV")
    text = page(compare([build(name, ranks=4, microbatches=8) for name in names], COSTS))
    visit = visit_page(text, viewport=DESK)
    cut = visit.page.evaluate(
        "() => [...document.querySelectorAll('.scrolling')]"
        ".filter((box) => box.scrollWidth > box.clientWidth).length"
    )
    assert cut == 0


def test_ranks_collapse_by_their_names_and_come_back(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    boxes = [visit.ask("box", 0, find_row(timeline, f"{rank}F0")) for rank in range(4)]
    left = visit.page.locator("#lanes-0").bounding_box()["x"]  # type: ignore[index]  # it is shown
    visit.page.mouse.click(left + 20, boxes[1]["y"] + 5)
    visit.settle()
    assert text_of(visit, "#status") == "Collapsed: rank 1"
    rows = [find_row(timeline, text) for text in ("0F0", "2F0", "3F0")]
    heights = [visit.ask("box", 0, row)["y"] for row in rows]
    assert heights == sorted(heights)
    # What is under the pointer is what is drawn there.
    for row in rows:
        point_at(visit, row)
        assert visit.ask("marks", 0)["hovered"] == row
    visit.page.locator("#expand").click()
    visit.settle()
    assert [visit.ask("box", 0, find_row(timeline, f"{rank}F0")) for rank in range(4)] == boxes
