"""The playground in use: sliders, play, dragging, keys, sharing, files, phone, themes."""

import re
import zlib
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from tests.browser import Opener, Visit
from tests.covering import all_but_slow
from tests.view.playground.pages import page

DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


def recall(visit: Visit, fragment: str) -> None:
    visit.page.evaluate("text => { location.hash = text; }", fragment)
    visit.page.wait_for_function(
        "text => penstock.settings().family === text", arg=fragment[2:].split("&")[0]
    )


def first_line(visit: Visit) -> str:
    return str(visit.ask("state")["csv"]).splitlines()[0]


def test_sliders_change_every_family_at_once(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    assert visit.page.locator(".card").count() == 13
    figures = visit.page.locator("#figures").inner_text().split("\n")
    assert figures[:6] == ["Step time", "33 s", "Bubble", "27.3 %", "Memory", "4 microbatches"]
    assert "idle (p-1)(F+B) = 9 s; memory p = 4" in figures
    visit.page.locator("#set-microbatches").focus()
    visit.page.keyboard.press("End")
    assert visit.ask("settings")["microbatches"] == 32
    assert visit.page.locator("#figures").inner_text().split("\n")[1] == "105 s"
    assert "step 96.75 s" not in visit.page.locator("#cards").inner_text()
    visit.page.locator("#set-ranks").focus()
    visit.page.keyboard.press("ArrowRight")
    reason = "DualPipe needs an even number of ranks (ranks: 5); use 4 or 6, or DualPipeV"
    assert visit.page.locator(".refused").all_inner_texts() == [reason]
    # Ranks were said to hold 9 "activations" beside a figure of 4.5 microbatches.
    recall(visit, "f=DualPipeV&p=4&m=8")
    assert "4.5 microbatches" in visit.page.locator("#figures").inner_text()
    held = visit.page.locator("#moments li").first.inner_text()
    assert held.endswith("holds at most 4.5 microbatches")


def test_a_size_that_the_family_refuses_is_said_beside_the_picture(visit_page: Opener) -> None:
    # It was a grey line at the top, above four ranks of DualPipe and a slider that said five.
    visit = visit_page(page(), viewport=DESK)
    recall(visit, "f=DualPipe&p=4&m=8")
    visit.page.locator("#set-ranks").focus()
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.locator("#focus-summary.wrong").inner_text() == (
        "DualPipe needs an even number of ranks (ranks: 5); use 4 or 6, or DualPipeV. "
        "The picture is still that of 4 ranks and 8 microbatches."
    )
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.locator("#focus-summary.wrong").count() == 0


def test_sorting_puts_the_fastest_training_first(visit_page: Opener) -> None:
    # Evaluation led the list, because it leaves out all backwards.
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#sort").select_option("endTime")
    names = visit.page.locator("#cards button").all_inner_texts()
    assert (names[:2], names[-1]) == (["InterleavedZeroBubble", "ZBV"], "ForwardOnly")
    # Of the same time but for rounding, so both are the best.
    recall(visit, "f=ZBV&p=6&m=12&F=0.7&I=0.7&W=0.7")
    assert visit.page.locator("#cards .best").count() >= 5


@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_a_chosen_family_comes_into_sight(viewport: dict[str, int], visit_page: Opener) -> None:
    # A click far down the list changed the large picture, which was out of sight.
    visit = visit_page(page(), viewport=viewport)
    visit.page.locator("#card-DualPipe").click()
    assert visit.page.locator("#focus-name").inner_text() == "DualPipe"
    top = visit.page.locator("#focus-name").bounding_box()["y"]  # type: ignore[index]
    assert 0 <= top < viewport["height"]


def test_chapters_keep_the_focus_of_the_keyboard(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#chapter-1").press("Enter")
    assert visit.page.evaluate("document.activeElement.id") == "chapter-1"
    visit.page.locator("#chapter-next").focus()
    focused = []
    for _ in range(5):
        visit.page.keyboard.press("Enter")
        focused.append(visit.page.evaluate("document.activeElement.id"))
    assert focused == ["chapter-next"] * 4 + ["chapter-1"]


def test_dragging_an_action_says_what_breaks_and_undo_mends_it(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    backward, forward = visit.ask("box", 0, 4), visit.ask("box", 0, 0)
    visit.page.mouse.move(backward["x"], backward["y"])
    visit.page.mouse.down()
    visit.page.mouse.move(forward["x"] - 6, forward["y"], steps=5)
    finding = "rank 0, position 0, 0B0: comes before its forward has ended (rule: order)"
    # The finding is there before the action is dropped.
    assert visit.ask("problems")[0].startswith(finding)
    visit.page.mouse.up()
    assert first_line(visit).startswith("0B0,0F0,0F1")
    assert finding in visit.page.locator("#findings").inner_text()
    assert "is stuck" in visit.page.locator("#moments").inner_text()
    visit.page.locator("#undo").click()
    assert first_line(visit).startswith("0F0,0F1")
    assert visit.ask("problems") == []


def test_everything_works_by_keyboard_alone(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    keys = visit.page.keyboard
    for _ in range(60):
        keys.press("Tab")
        if visit.page.evaluate("document.activeElement.id") == "picture":
            break
    assert visit.page.evaluate("document.activeElement.id") == "picture"
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    assert visit.ask("state")["selected"] == {"rank": 0, "position": 1}
    keys.press("Alt+ArrowLeft")
    assert first_line(visit).startswith("0F1,0F0,0F2")
    keys.press("ArrowDown")
    assert visit.ask("state")["selected"]["rank"] == 1
    keys.press("Delete")
    assert "is missing" in visit.ask("problems")[0]
    keys.press("Control+z")
    keys.press("Control+z")
    assert first_line(visit).startswith("0F0,0F1")
    keys.press("Home")
    assert visit.ask("state")["now"] == 0
    for _ in range(3):
        keys.press(".")
    assert visit.ask("state")["now"] == 3
    moments = visit.page.locator("#moments li").all_inner_texts()
    assert moments[1].split("\n")[-1] == "runs 1F2 (forward of microbatch 2) until 4 s"
    for _ in range(3):
        keys.press(".")
    assert visit.page.locator("#moments li").first.inner_text().split("\n")[-1] == (
        "waits: 0B0 needs 1B0 from rank 1, which starts at 8 s"
    )


def test_play_runs_to_the_end_of_the_step(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#speed").select_option("4")
    visit.page.locator("#play").click()
    assert visit.ask("state")["now"] is not None
    visit.page.wait_for_function("() => penstock.state().now === Infinity", timeout=60_000)
    assert visit.page.locator("#play").inner_text() == "▶ Play"


def test_five_chapters_set_the_page(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    seen = []
    visit.page.locator("#chapters button").first.click()
    for _ in range(5):
        state = visit.ask("settings")
        seen.append((state["family"], state["ranks"], state["microbatches"]))
        # The numbers in the text are those of the picture beside it.
        bubble = visit.page.locator("#figures dd").nth(1).inner_text()
        chapter = visit.page.locator("#chapter").inner_text()
        assert bubble in chapter or "bubble" not in chapter.lower().split("try:")[0]
        visit.page.locator("#chapter-next").click()
    assert seen == [
        ("1F1B", 1, 4),
        ("GPipe", 4, 1),
        ("GPipe", 4, 8),
        ("1F1B", 4, 8),
        ("ZBV", 4, 8),
    ]
    assert visit.page.locator("#chapter").count() == 0


def test_address_holds_settings_and_edited_order(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#text summary").click()
    visit.page.locator("#csv").fill("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    visit.page.locator("#apply").click()
    visit.page.locator("#set-transfer").focus()
    visit.page.keyboard.press("ArrowRight")
    before = visit.ask("state")
    visit.page.locator("#share").click()
    visit.page.wait_for_function("() => document.getElementById('status').textContent !== ''")
    address = visit.page.url
    visit.page.goto("about:blank")
    visit.page.goto(address)
    visit.page.evaluate("penstock.ready")
    after = visit.ask("state")
    assert before["csv"] == after["csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert before["numbers"] == after["numbers"]
    assert visit.page.locator("#focus-name").inner_text() == "Your order"


def packed(text: str) -> str:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (
        urlsafe_b64encode(deflate.compress(text.encode()) + deflate.flush()).decode().rstrip("=")
    )


@pytest.mark.parametrize(
    "fragment", ["csv=AAAA", "csv=%%%", f"csv={packed('0F0,<b>')}", f"csv={packed('0' * 9**8)}"]
)
def test_address_with_an_order_that_cannot_be_read_says_so(
    fragment: str, visit_page: Opener
) -> None:
    # The reason was written where nobody looks, in a closed part of the page.
    visit = visit_page(page(), viewport=DESK)
    recall(visit, f"f=ZBV&{fragment}")
    visit.page.wait_for_function("() => document.getElementById('status').textContent !== ''")
    assert visit.page.locator("#status").inner_text() == (
        "The order in this address cannot be read; this is the family's own"
    )
    assert visit.ask("problems") == []


def test_an_address_of_nonsense_gives_the_defaults(visit_page: Opener) -> None:
    visit = visit_page(page())
    before = visit.ask("settings")
    for fragment in (
        "f=1F1B&p=NaN&m=Infinity&F=NaN&W=1e308&I=-1&t=abc&l=x&g=2",
        "f=1F1B&p=4.5&m=&v=99&a=-0.1",
    ):
        recall(visit, fragment)
        assert visit.ask("settings") == before


def test_orders_that_are_too_large_are_refused_at_once(visit_page: Opener) -> None:
    # Thousands of ranks took six seconds; many stages and a far microbatch never came to an end.
    visit = visit_page(page())
    texts = {
        "256 ranks (got 9000)": "\n".join(f"{at}F0,{at}B0" for at in range(9000)),
        "200000 stages times microbatches (got 48018000)": ",".join(
            f"{at}F0,{at}F8002" for at in range(3000, 6000)
        )
        + ","
        + ",".join(f"{at}F0" for at in range(3000)),
        "20000 actions (got 120000)": ",".join(f"0F{at},0B{at}" for at in range(60000)),
        "1000000 letters (got 1000001)": "0" * 1000001,
    }
    for reason, text in texts.items():
        assert visit.ask("read", text) == [f"the page takes at most {reason}; use penstock show"]


def test_picture_of_a_stuck_order_shows_all_of_it(visit_page: Opener, tmp_path: Path) -> None:
    # What never runs was drawn far outside, since a step of zero seconds gave the scale.
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#text summary").click()
    visit.page.locator("#csv").fill("0B0,0F0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    visit.page.locator("#apply").click()
    with visit.page.expect_download() as download:
        visit.page.locator("#save-svg").click()
    download.value.save_as(tmp_path / "stuck.svg")
    text = (tmp_path / "stuck.svg").read_text(encoding="utf-8")
    ends = [
        float(x) + float(width)
        for x, width in re.findall(r'<rect x="(\S+)" y="\S+" width="(\S+)"', text)
    ]
    # The background, two lanes, eight actions, and a frame around the first of each rank.
    assert (len(ends), max(ends)) == (1 + 2 + 8 + 2, 1200)


def test_cells_of_a_spreadsheet_can_be_pasted(visit_page: Opener) -> None:
    # A spreadsheet copies its cells with tabs, which made one action of a row.
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#text summary").click()
    visit.page.locator("#csv").fill("0F0\t0F1\t\t0B0\t0B1\n1F0\t1B0\t1F1\t1B1\n")
    visit.page.locator("#apply").click()
    assert visit.ask("state")["csv"] == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_pasted_order_that_cannot_be_read_says_why(visit_page: Opener) -> None:
    visit = visit_page(page(), viewport=DESK)
    visit.page.locator("#text summary").click()
    visit.page.locator("#csv").fill("0F0,oops")
    visit.page.locator("#apply").click()
    assert visit.page.locator("#csv-error").inner_text() == (
        "rank 0, cell 1: not a valid action: 'oops' (expected STAGE KIND MICROBATCH, e.g. 2F0)"
    )
    visit.page.locator("#csv").fill("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")
    visit.page.locator("#apply").click()
    assert visit.page.locator("#csv-error").inner_text().startswith("4 sends, receives")
    # It was called an invalid action, which it is not.
    visit.page.locator("#csv").fill("0F0,0RECOMPUTE0,0B0")
    visit.page.locator("#apply").click()
    assert visit.page.locator("#csv-error").inner_text() == (
        "the page takes no actions that recompute or offload (got 0RECOMPUTE0); use penstock show"
    )
    assert visit.ask("problems") == []


def test_picture_and_order_are_saved_as_files(visit_page: Opener, tmp_path: Path) -> None:
    visit = visit_page(page(), viewport=DESK)
    starts = {"svg": b"<svg ", "png": b"\x89PNG\r\n", "csv": b"0F0,0F1,"}
    for suffix, start in starts.items():
        with visit.page.expect_download() as download:
            visit.page.locator(f"#save-{suffix}").click()
        assert download.value.suggested_filename == f"1f1b-4x8.{suffix}"
        target = tmp_path / f"file.{suffix}"
        download.value.save_as(target)
        assert target.read_bytes().startswith(start)
    text = (tmp_path / "file.svg").read_text(encoding="utf-8")
    assert "1F1B, 4 ranks, 8 microbatches: step 33 s, bubble 27.3 %" in text
    # A lane per rank, a bar per action, the background, and nothing else.
    assert text.count("<rect") == 4 + 64 + 1


@pytest.mark.parametrize("scheme", all_but_slow(["light", "dark"], ["dark"]))
def test_phone_shows_everything_without_scrolling_sideways(
    scheme: str, visit_page: Opener
) -> None:
    visit = visit_page(page(), viewport=PHONE, color_scheme=scheme, has_touch=True)
    assert visit.page.evaluate("document.documentElement.dataset.theme") == scheme
    for fragment in ("f=DualPipe&p=8&m=32", "f=Interleaved1F1B&p=8&m=32&v=4"):
        recall(visit, fragment)
        assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    visit.page.locator("#settings summary").click()
    assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    recall(visit, "f=1F1B&p=2&m=2")
    visit.page.locator("#picture").scroll_into_view_if_needed()
    box = visit.ask("box", 0, 1)
    visit.page.touchscreen.tap(box["x"], box["y"])
    assert visit.ask("state")["selected"] == {"rank": 0, "position": 1}
    visit.page.locator("#earlier").click()
    assert first_line(visit).startswith("0F1,0F0")
