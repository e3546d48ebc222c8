"""SVG pictures match their timeline and stay small."""

import re
from xml.etree.ElementTree import Element, fromstring, tostring

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.layout import rectangles
from penstock.view.palette import shade
from penstock.view.svg import MAX_BARS, MAX_RANKS, is_summarised, timeline_drawing
from tests.view.timelines import EVERY_FAMILY, EVERY_NAME, timeline_of

FEW_BARS = [
    each
    for each, timeline in zip(EVERY_NAME, EVERY_FAMILY.values(), strict=True)
    if len(timeline.schedule.rows) <= MAX_BARS
]
# The left edge of the bars, and the width of all of them.
LEFT, WIDTH = 60.0, 840.0


def picture_of(timeline: Timeline) -> Element:
    """Return the picture after writing and parsing it."""
    return fromstring(tostring(timeline_drawing(timeline), encoding="unicode"))


def bars_of(picture: Element) -> list[tuple[str, str, float, float]]:
    """Return the text, colour, left and width of every bar."""
    return [
        (text, box.attrib["fill"], float(box.attrib["x"]), float(box.attrib["width"]))
        for box in picture.iter("rect")
        if (text := box.findtext("title")) is not None
    ]


@pytest.mark.parametrize("name", FEW_BARS)
def test_every_bar_is_at_the_time_of_its_action(name: str) -> None:
    timeline = EVERY_FAMILY[name]
    bars = rectangles(timeline)
    found = bars_of(picture_of(timeline))
    assert len(found) == len(bars)
    scale = WIDTH / bars.seconds
    for bar, (text, colour, left, width) in enumerate(found):
        action = timeline.schedule.rows.action(int(bars.row[bar]))
        assert text.startswith(f"{action}: ")
        kind, local_stage = Kind(int(bars.kind[bar])), int(bars.local_stage[bar])
        assert colour == shade(kind, local_stage, bars.num_local_stages)
        assert left == pytest.approx(LEFT + (bars.left[bar] - bars.begin) * scale, abs=0.01)
        length = (bars.right[bar] - bars.left[bar]) * scale
        assert width == pytest.approx(length, abs=0.02) or width == pytest.approx(
            length - 0.5, abs=0.02
        )


@pytest.mark.parametrize("name", FEW_BARS)
def test_seconds_scales_the_bars(name: str) -> None:
    timeline = EVERY_FAMILY[name]
    seconds = 2 * timeline.end_time
    alone = bars_of(picture_of(timeline))
    beside = bars_of(fromstring(tostring(timeline_drawing(timeline, seconds=seconds))))
    scale = rectangles(timeline).seconds / seconds
    assert [text for text, *_ in beside] == [text for text, *_ in alone]
    assert [left - LEFT for _, _, left, _ in beside] == pytest.approx(
        [(left - LEFT) * scale for _, _, left, _ in alone], abs=0.02
    )


def test_seconds_scales_the_columns_of_a_summary() -> None:
    timeline = timeline_of("ZBV", 8, 32)
    picture = timeline_drawing(timeline, seconds=4 * timeline.end_time)
    lefts = [
        float(left)
        for path in picture.iter("path")
        for left in re.findall(r"M([0-9.]+) ", path.attrib["d"])
    ]
    assert LEFT <= min(lefts) <= max(lefts) <= LEFT + WIDTH / 4


def test_tooltip_of_a_bar_has_its_action_and_times() -> None:
    texts = [text for text, *_ in bars_of(picture_of(timeline_of("1F1B", 2, 1)))]
    assert texts == ["0F0: 0 to 1 s", "0B0: 4 to 6 s", "1F0: 1 to 2 s", "1B0: 2 to 4 s"]


def test_picture_has_a_text_description() -> None:
    picture = picture_of(timeline_of("1F1B", 4, 8))
    assert picture.attrib["role"] == "img"
    assert picture.attrib["aria-label"] == (
        "1F1B: 4 ranks, 8 microbatches, end time 33 s, bubble 27.3 %"
    )
    texts = [text.text for text in picture.iter("text")]
    assert [text for text in texts if text and not text.isdigit()] == [
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 3",
        "0 s",
        "Forward",
        "Full backward",
    ]


def test_communication_that_takes_no_time_is_left_out() -> None:
    schedule = build("ZBV", ranks=2, microbatches=4)
    plain, lowered = (tostring(timeline_drawing(simulate(s))) for s in (schedule, lower(schedule)))
    assert plain == lowered


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("ZBV", 8, 32), ("1F1B", 64, 128), ("DualPipeV", 16, 40), ("GPipe", 200, 8)],
)
def test_many_bars_are_summarised_in_proportion(name: str, ranks: int, microbatches: int) -> None:
    timeline = timeline_of(name, ranks, microbatches)
    assert is_summarised(timeline)
    picture = picture_of(timeline)
    shown = min(ranks, MAX_RANKS)
    lanes = [box for box in picture.iter("rect") if box.attrib["fill"] == "currentColor"]
    assert len(lanes) == shown
    area = sum(float(lane.attrib["width"]) * float(lane.attrib["height"]) for lane in lanes)
    filled = 0.0
    for path in picture.iter("path"):
        for width, height in re.findall(r"h([\d.]+)v([\d.]+)h-", path.attrib["d"]):
            filled += float(width) * float(height)
    busy = sum(timeline.busy_seconds[:shown]) / (shown * timeline.end_time)
    # Not exact, because a column that is busy for most of its time counts as busy.
    assert filled / area == pytest.approx(busy, abs=0.08)


def test_picture_of_a_very_large_timeline_stays_small() -> None:
    timeline = timeline_of("ZBV", 64, 512, Costs(transfer=0.1))
    assert len(timeline.schedule.rows) == 64 * 512 * 6
    assert len(tostring(timeline_drawing(timeline))) < 400_000


def test_timeline_of_zero_length_is_idle() -> None:
    costs = Costs(forward=0, backward_input=0, backward_weight=0)
    picture = picture_of(timeline_of("GPipe", 2, 2, costs))
    assert bars_of(picture) == []
    assert {box.attrib["fill"] for box in picture.iter("rect")} == {"currentColor"}
