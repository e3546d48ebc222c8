"""The HTML of a page: its size, its tables, and what it rejects."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.passes import add_recompute
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.html.page import page
from tests.view.timelines import EVERY_FAMILY, EVERY_NAME, UNEVEN, timeline_of


class _Tags(HTMLParser):
    """The tags of a page, and the tags that are still open."""

    VOID = ("meta", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def cells_of(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    section = re.search(rf"<section><h2>{title}</h2>(.*?)</section>", text, re.DOTALL)
    assert section is not None
    body = section[1].partition("<tbody>")[2]
    lines = re.findall(r"<tr>(.*?)</tr>", body)
    return [[unescape(cell) for cell in re.findall(r">([^<]+)</t[hd]>", line)] for line in lines]


def with_noise(timeline: Timeline) -> Timeline:
    """Return a timeline as if recorded: all durations differ, and ranks pause between actions."""
    random, rows = np.random.default_rng(0), timeline.schedule.rows
    seconds = (timeline.end - timeline.start) * random.uniform(0.8, 1.2, len(rows))
    pauses = random.exponential(0.02, len(rows))
    end = np.concatenate(
        [np.cumsum(part) for part in np.split(seconds + pauses, rows.first[1:-1])]
    )
    return replace(timeline, start=end - seconds, end=end)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_tag_is_closed_and_every_id_is_unique(name: str) -> None:
    tags = _Tags(page(EVERY_FAMILY[name]))
    names = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert tags.open == []
    assert len(set(names)) == len(names)


def test_page_links_to_nothing_outside_itself() -> None:
    tags = _Tags(page(timeline_of("ZBV", 4, 8)))
    links = {
        value
        for _, attributes in tags.seen
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset")
    }
    assert links == {"data:,", "#numbers"}
    assert not any("style" in attributes or "onclick" in attributes for _, attributes in tags.seen)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [
        pytest.param("DualPipeV", 32, 1560, marks=pytest.mark.slow),
        pytest.param("ForwardOnly", 1000, 200, marks=pytest.mark.slow),
        pytest.param("1F1B", 64, 1563, marks=pytest.mark.slow),
        pytest.param("ZBV", 16, 2084, marks=pytest.mark.slow),
    ],
)
def test_two_hundred_thousand_actions_take_ten_bytes_each(
    name: str, ranks: int, microbatches: int
) -> None:
    assert check_bytes_each(name, ranks, microbatches) >= 200_000


def test_twenty_thousand_actions_take_ten_bytes_each() -> None:
    assert check_bytes_each("DualPipeV", 8, 640) >= 20_000


def check_bytes_each(name: str, ranks: int, microbatches: int) -> int:
    """Check how many bytes an action takes on the page, and return how many there are."""
    timeline = timeline_of(name, ranks, microbatches, replace(UNEVEN, activation_bytes=12345))
    base = len(page(timeline_of(name, 1, 1)))
    for each, most in ((timeline, 2), (with_noise(timeline), 10)):
        assert (len(page(each).encode()) - base) / len(timeline.schedule.rows) < most
    return len(timeline.schedule.rows)


def test_tables_list_the_numbers_and_their_differences() -> None:
    costs = Costs(transfer=0.25, activation_bytes=2**30)
    text = page({"before": timeline_of("1F1B", 2, 4, costs), "after": timeline_of("ZB-H1", 2, 4)})
    minus = "\N{MINUS SIGN}"
    assert cells_of(text, "Numbers") == [
        ["end time s", "16", "13", f"{minus}3", "0.812"],
        ["bubble, all ranks", "25.0 %", "7.7 %", f"{minus}17.3 points", "0.308"],
        ["longest span of a rank s", "16", "13", f"{minus}3", "0.812"],
        ["bubble as papers count", "25.0 %", "7.7 %", f"{minus}17.3 points", "0.308"],
        ["peak microbatches", "2", "2", "0", "1.000"],
        ["peak bytes", "2 GiB", "not known"],
        ["Forward s, all ranks", "8", "8", "0", "1.000"],
        ["Backward input s, all ranks", "0", "8", "+8"],
        ["Backward weight s, all ranks", "0", "8", "+8"],
        ["Full backward s, all ranks", "16", "0", f"{minus}16", "0.000"],
        ["Idle s, all ranks", "8", "2", f"{minus}6", "0.250"],
    ]
    assert cells_of(text, "Idle time by reason") == [
        ["waiting for forward", "0.25", "0", f"{minus}0.25", "0.000"],
        ["waiting for backward input", "0", "1", "+1"],
        ["waiting for full backward", "3.25", "0", f"{minus}3.25", "0.000"],
        ["waiting for a transfer", "1", "0", f"{minus}1", "0.000"],
        ["before the first action and after the last", "3.5", "1", f"{minus}2.5", "0.286"],
    ]


def test_every_reason_of_idle_time_has_the_colour_that_its_bar_has() -> None:
    # The bars had five colours, and nothing on the page named them.
    text = page(timeline_of("1F1B", 2, 4, Costs(transfer=0.25)))
    _, _, section = text.partition("<h2>Idle time by reason</h2>")
    section, _, _ = section.partition("</section>")
    bar, _, table = section.partition("<table>")
    shown = [
        look
        for look, width in re.findall(r'<rect (\S+) x="\S+" width="(\S+)"', bar)
        if float(width)
    ]
    assert re.findall(r'<rect (\S+) width="10"', table) == shown
    assert len(shown) == len(cells_of(text, "Idle time by reason")) == 4


def test_recomputation_has_a_line_of_its_own() -> None:
    plain = timeline_of("1F1B", 2, 4)
    less = simulate(add_recompute(plain.schedule, [(0, 0), (0, 1)]), Costs(forward=1.5))
    lines = cells_of(page({"plain": plain, "less": less}), "Numbers")
    assert ["Recompute s, all ranks", "0", "3", "+3"] in lines


def test_stages_are_compared_if_the_number_of_stages_is_equal() -> None:
    slower = timeline_of("1F1B", 2, 4, Costs(forward=[1, 2]))
    text = page({"predicted": timeline_of("1F1B", 2, 4), "recorded": slower})
    assert cells_of(text, "Stages") == [
        ["stage 0, forward", "1", "1", "0", "1.000"],
        ["stage 0, full backward", "2", "2", "0", "1.000"],
        ["stage 1, forward", "1", "2", "+1", "2.000"],
        ["stage 1, full backward", "2", "2", "0", "1.000"],
    ]
    other = page({"one": timeline_of("1F1B", 2, 4), "two": timeline_of("ZBV", 2, 4)})
    assert "<h2>Stages</h2>" not in other


def test_rank_table_has_a_line_per_rank() -> None:
    text = page(timeline_of("1F1B", 2, 4, Costs(activation_bytes=2**30)))
    assert cells_of(text, "Ranks") == [
        ["0", "0", "12", "3", "20.0 %", "2", "2 GiB"],
        ["1", "1", "12", "3", "20.0 %", "1", "1 GiB"],
    ]


def test_title_defaults_to_the_names() -> None:
    timeline = timeline_of("1F1B", 2, 2)
    found = [
        re.findall("<title>(.*)</title>", text)
        for text in (
            page(timeline),
            page({"predicted": timeline, "recorded": timeline}),
            page(dict.fromkeys("abc", timeline)),
            page(timeline, title="R&D <one>"),
        )
    ]
    assert found == [["1F1B"], ["predicted and recorded"], ["a, b and c"], ["R&amp;D &lt;one&gt;"]]


def test_names_are_escaped_everywhere() -> None:
    evil = "</script><b>&'\""
    text = page({evil: timeline_of("1F1B", 2, 2)})
    data = re.findall(r'<script type="application/json" id="data">(.*)</script>', text)
    assert "<b>" not in text
    assert json.loads(data[0])["timelines"][0]["name"] == evil


def test_empty_page_is_rejected() -> None:
    with pytest.raises(ArgumentError, match="timelines must not be empty; give at least one"):
        page({})
