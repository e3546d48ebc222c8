"""Pictures match their timeline, and pages get the pictures they request."""

import re
import zlib
from base64 import b64decode
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest

from docs_build.memory_curves import memory_drawing
from docs_build.picture_files import expected_files, with_links
from docs_build.pictures import Sizes, draw_pictures, one_scale, picture, price
from penstock.errors import ArgumentError
from penstock.schedules.registry import FAMILIES
from penstock.view.layout import rectangles

ROOT = Path(__file__).parents[2]
MAX_BYTES = 15_000
LEFT, WIDTH = 60.0, 840.0


@pytest.mark.parametrize("name", FAMILIES)
def test_picture_has_every_bar_at_its_position_in_few_bytes(name: str) -> None:
    timeline = price(name, Sizes())
    seconds = 1.5 * timeline.end_time
    text = picture(timeline, seconds=seconds)
    outlines = "".join(path.attrib["d"] for path in fromstring(text).iter("path"))
    found = sorted(
        (float(left), float(width))
        for left, width in re.findall(r"M([0-9.]+) [0-9.]+h([0-9.]+)v", outlines)
    )
    bars = rectangles(timeline)
    scale = WIDTH / seconds
    expected = sorted(
        (LEFT + (left - bars.begin) * scale, (right - left) * scale)
        for left, right in zip(bars.left.tolist(), bars.right.tolist(), strict=True)
    )
    assert len(found) == len(expected)
    for (left, width), (expected_left, expected_width) in zip(found, expected, strict=True):
        assert left == pytest.approx(expected_left, abs=0.1)
        assert expected_width - 0.7 <= width <= expected_width + 0.1
    assert len(text) < MAX_BYTES


def test_bars_show_their_microbatches() -> None:
    timeline = price("1F1B", Sizes(ranks=2, microbatches=2))
    figure = fromstring(picture(timeline, seconds=one_scale([timeline])))
    lanes = [text.text for text in figure.iter("text") if text.get("text-anchor") == "middle"]
    assert sorted(lanes, key=str) == ["0011", "0101"]


def test_caption_has_the_numbers() -> None:
    timeline = price("1F1B", Sizes(ranks=4, microbatches=8))
    caption = fromstring(picture(timeline, seconds=40)).find("figcaption")
    assert caption is not None
    assert "".join(caption.itertext()) == (
        "1F1B, 4 ranks, 8 microbatches: end time 33 s, bubble 27.3 %, "
        "at most 4 microbatches in memory"
    )


def test_pictures_of_one_request_share_a_scale() -> None:
    page = draw_pictures("before\n\n<!-- picture: GPipe ZBV, ranks=2, microbatches=4 -->\n\nafter")
    before, first, second, after = page.split("\n\n")
    assert (before, after) == ("before", "after")
    timelines = [price(name, Sizes(2, 4)) for name in ("GPipe", "ZBV")]
    seconds = one_scale(timelines)
    assert [first, second] == [picture(timeline, seconds=seconds) for timeline in timelines]


def test_other_comments_are_kept() -> None:
    text = "<!-- a note -->"
    assert draw_pictures(text) == text


def test_unknown_setting_is_rejected() -> None:
    message = r"must be among ranks, microbatches, transfer, seconds, memory \(got rank\)"
    with pytest.raises(ArgumentError, match=message):
        draw_pictures("<!-- picture: GPipe, rank=2 -->")


def test_scale_that_is_too_short_is_rejected() -> None:
    with pytest.raises(ArgumentError, match=r"at least 12 for GPipe \(got 11\)"):
        draw_pictures("<!-- picture: GPipe, ranks=4, microbatches=1, seconds=11 -->")


def test_site_shows_the_drawn_picture_in_place_of_the_linked_file() -> None:
    request = "<!-- picture: GPipe, ranks=2, microbatches=4 -->"
    page = with_links(f"before\n\n{request}\n\nafter", Path("docs/howto/learner.md"))
    assert "](../pictures/GPipe-ranks-2-microbatches-4.svg)" in page
    assert with_links(page, Path("docs/howto/learner.md")) == page
    assert draw_pictures(page) == draw_pictures(f"before\n\n{request}\n\nafter")


def inflated(text: str) -> str:
    """Return a page with its compressed columns unpacked: zlib's versions compress differently."""
    return re.sub(
        r'"deflated":"([^"]+)"',
        lambda found: zlib.decompress(b64decode(found[1]), -zlib.MAX_WBITS).hex(),
        text,
    )


def test_pages_and_picture_files_are_current() -> None:
    files = expected_files()
    # The README's picture was a figure of an older simulator; its playground is a file as well.
    assert {Path("README.md"), Path("playground.html")} <= set(files)
    wrong = [
        str(path)
        for path, text in files.items()
        if inflated((ROOT / path).read_text("utf-8")) != inflated(text)
    ]
    assert wrong == [], "run: python -m docs_build.picture_files"
    committed = {path.relative_to(ROOT) for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert committed == {path for path in files if path.suffix == ".svg"}


def test_memory_curve_has_the_peak_of_every_rank() -> None:
    timeline = price("1F1B", Sizes(ranks=4, microbatches=8))
    drawing = memory_drawing(timeline, seconds=timeline.end_time)
    labels = [text.text for text in drawing.iter("text")]
    assert labels == ["holds 4", "holds 3", "holds 2", "holds 1"]
    # Rank 3 holds one microbatch from the start of a forward to the end of its backward.
    last = list(drawing.iter("path"))[3].attrib["d"]
    steps = [float(across) for across in re.findall(r"H([0-9.]+)V", last)]
    scale = 840.0 / 33.0
    assert steps[1:3] == pytest.approx([60 + 3 * scale, 60 + 6 * scale], abs=0.1)
