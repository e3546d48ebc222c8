"""The page in use: mouse, keys, touch, search, themes and screen readers."""

import pytest

from penstock.ir.schedule import Schedule
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.view.html.data import tick_of
from penstock.view.html.page import page
from penstock.view.palette import contrast
from tests.browser import Opener, Visit
from tests.covering import all_but_slow
from tests.view.html.pages import COSTS, DESK, PHONE, click_on, find_row, point_at, press, text_of
from tests.view.timelines import timeline_of


def test_tooltip_of_an_action_has_its_times_and_dependencies(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    row = find_row(timeline, "2F0")
    point_at(visit, row)
    assert visit.ask("marks", 0)["hovered"] == row
    assert text_of(visit, "#tip").splitlines() == [
        "2F0 Forward, rank 2",
        "time",
        "2.5 to 3.5 s (1 s)",
        "memory",
        "1 activation",
        "depends on",
        "1F0 on rank 1",
        "waited for",
        "1F0 on rank 1, which ended at 2.25 s",
        "needed by",
        "3F0 on rank 3, 2B0 on rank 2",
    ]
    visit.page.mouse.move(2, 2)
    assert visit.page.locator("#tip").is_hidden()


def test_tooltip_of_idle_time_has_its_reason(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    box = visit.ask("box", 0, find_row(timeline, "0B0"))
    visit.page.mouse.move(box["x"] - 20, box["y"] + 5)
    assert text_of(visit, "#tip") == "idle until 11.5 s\n0B0 waits for 1B0 on rank 1"


def test_click_selects_the_chain_and_escape_clears_it(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    row = find_row(timeline, "2F3")
    click_on(visit, row)
    marks = visit.ask("marks", 0)
    texts = {str(timeline.schedule.rows.action(each)) for each in marks["lit"]}
    assert marks["selected"] == row
    assert texts == {f"{stage}{kind}3" for stage in range(4) for kind in "FB"}
    chain = " ".join(visit.page.locator("#details li").all_inner_texts())
    assert chain == "0F3 1F3 2F3 3F3 3B3 2B3 1B3 0B3"
    assert text_of(visit, "#status").startswith("2F3 on rank 2, ")
    visit.page.locator("#details li button").first.click()
    assert visit.ask("marks", 0)["selected"] == find_row(timeline, "0F3")
    press(visit, "Escape")
    assert visit.ask("marks", 0) == {
        "lit": [],
        "selected": -1,
        "hovered": -1,
        "showsCritical": False,
    }
    assert visit.page.locator("#details").is_hidden()


def test_wheel_with_ctrl_zooms_around_the_pointer_and_zero_resets(visit_page: Opener) -> None:
    timeline = timeline_of("ZBV", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    row, whole = find_row(timeline, "1F3"), visit.ask("window")
    point_at(visit, row)
    before = visit.ask("box", 0, row)
    visit.page.keyboard.down("Control")
    visit.page.mouse.wheel(0, -600)
    visit.page.keyboard.up("Control")
    visit.settle()
    after = visit.ask("box", 0, row)
    assert after["width"] > 2 * before["width"]
    middles = [box["x"] + box["width"] / 2 for box in (before, after)]
    # The pointer is on a whole pixel, up to half a pixel beside the middle, before the zoom.
    half = after["width"] / before["width"] / 2
    assert middles[1] == pytest.approx(middles[0], abs=half)
    press(visit, "0")
    assert visit.ask("window") == whole


def test_zoom_stops_before_a_pixel_is_less_than_a_tick(visit_page: Opener) -> None:
    timeline = timeline_of("ZBV", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    press(visit, *["+"] * 60)
    left, right = visit.ask("window")
    assert (right - left) / DESK["width"] >= tick_of(timeline)
    press(visit, *["-"] * 70)
    assert visit.ask("window") == pytest.approx([0, timeline.end.max()])


def test_arrow_keys_and_dragging_move_the_picture(visit_page: Opener) -> None:
    timeline = timeline_of("ZBV", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    visit.page.locator("#lanes-0").focus()
    press(visit, "+", "+", "+")
    left, right = visit.ask("window")
    press(visit, "ArrowRight")
    assert visit.ask("window")[0] > left
    press(visit, "ArrowLeft")
    assert visit.ask("window") == pytest.approx([left, right])
    visit.page.mouse.move(600, 300)
    visit.page.mouse.down()
    visit.page.mouse.move(700, 300, steps=4)
    visit.page.mouse.up()
    visit.settle()
    assert visit.ask("window")[0] < left
    assert visit.ask("marks", 0)["selected"] == -1


def test_shift_with_an_arrow_selects_the_neighbouring_action(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    visit.page.locator("#lanes-0").focus()
    walked = []
    for key in ("Right", "Right", "Right", "Down", "Left", "Up"):
        press(visit, f"Shift+Arrow{key}")
        walked.append(str(timeline.schedule.rows.action(visit.ask("marks", 0)["selected"])))
    assert walked == ["0F0", "0F1", "0F2", "1F0", "1F0", "0F1"]
    # The keys zoomed around the middle, and left what was selected behind.
    for key in "+++":
        press(visit, key)
    left, right = visit.ask("window")
    assert left < 1.5 < right < timeline.end_time / 2


def test_critical_path_memory_and_theme_can_be_toggled(visit_page: Opener) -> None:
    visit = visit_page(page(timeline_of("ZBV", 4, 8, COSTS)), viewport=DESK, color_scheme="light")
    for name, key in (("critical", "c"), ("memory", "m"), ("theme", "d")):
        button = visit.page.locator(f"#{name}")
        before = button.get_attribute("aria-pressed")
        press(visit, key)
        assert button.get_attribute("aria-pressed") != before
        button.click()
        assert button.get_attribute("aria-pressed") == before
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_selector('html[data-theme="dark"]', timeout=10_000)
    press(visit, "c")
    assert visit.ask("marks", 0)["showsCritical"] is True


FOUND = {
    "rank 3": [f"3{kind}{microbatch}" for microbatch in range(8) for kind in "FB"],
    "microbatch 4": [f"{stage}{kind}4" for stage in range(4) for kind in "FB"],
    "stage 2": [f"2{kind}{microbatch}" for microbatch in range(8) for kind in "FB"],
    "f2": [f"{stage}F2" for stage in range(4)],
    "1b": [f"1B{microbatch}" for microbatch in range(8)],
}


def ask_for(visit: Visit, query: str) -> str:
    """Type into the search box and return the status line."""
    press(visit, "Escape", "/")
    visit.page.locator("#query").fill(query)
    press(visit, "Enter")
    return text_of(visit, "#status")


def test_search_finds_actions_ranks_stages_and_microbatches(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=DESK)
    assert ask_for(visit, " 2f5").startswith("2F5 on rank 2, ")
    assert visit.ask("marks", 0)["selected"] == find_row(timeline, "2F5")
    for query, found in FOUND.items():
        assert ask_for(visit, query).startswith(f"1 of {len(found)}: ")
        lit = visit.ask("marks", 0)["lit"]
        assert {str(timeline.schedule.rows.action(row)) for row in lit} == set(found)
        press(visit, "Enter")
        assert text_of(visit, "#status").startswith(f"2 of {len(found)}: ")
    assert ask_for(visit, "9F9") == "Nothing found"
    assert ask_for(visit, "what?").startswith("Not a valid search; try 2F5")


def test_comparison_shares_the_axis_and_shows_the_difference(visit_page: Opener) -> None:
    schedules = [timeline_of(name, 4, 8).schedule for name in ("1F1B", "ZB-H1")]
    timelines = compare(schedules, COSTS)
    visit = visit_page(page(timelines), viewport=DESK)
    assert text_of(visit, "#numbers tbody tr:first-child >> nth=0").split() == (
        ["end", "time", "s", "37", "30", "\N{MINUS SIGN}7", "0.811"]
    )
    first = [visit.ask("box", at, find_row(t, "0F0")) for at, t in enumerate(timelines.values())]
    assert first[0]["x"] == first[1]["x"]
    assert first[0]["width"] == first[1]["width"]
    # The same action is selected in both, and the details compare them.
    row = find_row(timelines["1F1B"], "1F2")
    click_on(visit, row)
    assert visit.ask("marks", 1)["selected"] == find_row(timelines["ZB-H1"], "1F2")
    assert "time in ZB-H1" in text_of(visit, "#details")


# For every element with text: its colour, and the nearest background behind it.
READ_COLOURS = """() => {
    const hex = colour => "#" + colour.match(/\\d+/g).slice(0, 3)
        .map(channel => Number(channel).toString(16).padStart(2, "0")).join("");
    const behind = element => {
        const {backgroundColor} = getComputedStyle(element);
        const isClear = backgroundColor === "rgba(0, 0, 0, 0)";
        return isClear ? behind(element.parentElement) : hex(backgroundColor);
    };
    const holdsText = element => [...element.childNodes]
        .some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    return [...document.querySelectorAll("body *")]
        .filter(element => element.checkVisibility() && holdsText(element))
        .map(element => [element.tagName, hex(getComputedStyle(element).color), behind(element)]);
}"""


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    all_but_slow(
        [(DESK, "light"), (DESK, "dark"), (PHONE, "light"), (PHONE, "dark")],
        [(DESK, "light"), (PHONE, "dark")],
    ),
    ids=["desk-light", "desk-dark", "phone-light", "phone-dark"],
)
def test_page_fits_the_screen_with_enough_contrast(
    visit_page: Opener, scheme: str, viewport: dict[str, int]
) -> None:
    timelines = compare([timeline_of(name, 4, 8).schedule for name in ("1F1B", "ZBV")], COSTS)
    visit = visit_page(page(timelines), viewport=viewport, color_scheme=scheme)
    click_on(visit, 3)
    assert visit.page.locator("html").get_attribute("data-theme") == scheme
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    colours = visit.page.evaluate(READ_COLOURS)
    assert len(colours) > 50
    assert [entry for entry in colours if contrast(*entry[1:]) < 4.5] == []


def test_two_fingers_zoom_on_a_phone(visit_page: Opener) -> None:
    timeline = timeline_of("1F1B", 4, 8, COSTS)
    visit = visit_page(page(timeline), viewport=PHONE, has_touch=True)
    whole, area = visit.ask("window"), visit.page.locator("#lanes-0").bounding_box()
    assert area is not None
    session = visit.page.context.new_cdp_session(visit.page)
    y = area["y"] + 40
    for kind, gap in (("touchStart", 40), ("touchMove", 90), ("touchMove", 140)):
        points = [{"x": 180 - gap / 2, "y": y, "id": 0}, {"x": 180 + gap / 2, "y": y, "id": 1}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    visit.settle()
    left, right = visit.ask("window")
    assert right - left < (whole[1] - whole[0]) / 2


def test_everything_has_a_role_a_name_and_a_tab_stop(visit_page: Opener) -> None:
    visit = visit_page(page(timeline_of("ZBV", 4, 8, COSTS)), viewport=DESK)
    for role, name in (
        ("toolbar", "Timeline"),
        ("searchbox", "Find an action, a rank, a stage or a microbatch"),
        ("button", "Zoom in"),
        ("button", "Critical path"),
        ("status", ""),
        ("application", "Timeline of ZBV"),
        ("table", ""),
    ):
        found = visit.page.get_by_role(role, name=name)  # type: ignore[arg-type]  # a literal
        assert found.count() >= 1, (role, name)
    reached = []
    for _ in range(15):
        press(visit, "Tab")
        reached.append(visit.page.evaluate("document.activeElement.id"))
    expected = "query zoom-out zoom-in reset critical memory share save-png save-svg theme keys"
    assert " ".join(reached[1:13]) == f"{expected} lanes-0"
    press(visit, "?")
    assert visit.page.get_by_role("dialog", name="Keys and gestures").is_visible()


def test_names_cannot_inject_html(visit_page: Opener) -> None:
    evil = (
        '</script><script>document.title = "taken"</script><img src=x onerror="alert(1)">&amp;$x'
    )
    schedule = Schedule.from_orders([["0F0", "0B0"], ["1F0", "1B0"]], name=evil)
    timeline = simulate(schedule)
    visit = visit_page(page({evil: timeline, "other": timeline}, title=evil), viewport=DESK)
    assert visit.page.title() == evil
    assert visit.page.locator("h1").inner_text() == evil
    assert visit.page.locator("h2").first.inner_text() == evil
    click_on(visit, 0, at=1)
    assert f"time in {evil}" in text_of(visit, "#details")
    assert visit.page.locator("img").count() == 0
    assert visit.page.locator("script").count() == 2
