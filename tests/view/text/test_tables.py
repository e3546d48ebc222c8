"""Tables of timelines in the terminal."""

import io
from textwrap import dedent

from rich.console import Console, RenderableType

from penstock.costs import Costs
from penstock.view.text.tables import rank_table, summary_table
from tests.view.timelines import timeline_of

CONSOLE = Console(file=io.StringIO(), width=100, color_system=None)


def picture(text: str) -> str:
    """Remove the indentation of the test from an expected picture."""
    return dedent(text).strip("\n")


def printed(renderable: RenderableType) -> str:
    """Print without colour, and without spaces at the ends of lines."""
    with CONSOLE.capture() as capture:
        CONSOLE.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_summary_compares_schedules_with_the_first() -> None:
    timelines = {name: timeline_of(name, 4, 8) for name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2")}
    assert printed(summary_table(timelines)) == picture("""
        schedule  end time s  ratio  bubble  peak microbatches
        GPipe             33  1.000  27.3 %                  8
        1F1B              33  1.000  27.3 %                  4
        ZB-H1             27  0.818  11.1 %                  4
        ZB-H2             27  0.818  11.1 %                  7
    """)


def test_summary_shows_the_seconds_of_the_boundary() -> None:
    timelines = {name: timeline_of(name, 4, 8) for name in ("1F1B", "ZB-H2")}
    assert printed(summary_table(timelines, "nothing")) == picture("""
        schedule  period s  ratio  bubble  peak microbatches
        1F1B            33  1.000  27.3 %                  4
        ZB-H2           24  0.727   0.0 %                  7
    """)
    assert printed(summary_table(timelines, "papers")).split("\n")[0].split()[:4] == [
        "schedule",
        "longest",
        "span",
        "s",
    ]


def test_summary_has_bytes_if_the_costs_have_them() -> None:
    timelines = {"a": timeline_of("1F1B", 2, 4, Costs(activation_bytes=3 * 2**30))}
    assert printed(summary_table(timelines)) == picture("""
        schedule  end time s  ratio  bubble  peak microbatches  peak bytes
        a                 15  1.000  20.0 %                  2       6 GiB
    """)


def test_rank_table_has_a_line_per_rank() -> None:
    timeline = timeline_of("ZBV", 3, 5, Costs(2, 2, 2, transfer=0.5, activation_bytes=2000))
    assert printed(rank_table(timeline)) == picture("""
        rank  stages  busy s  idle s  bubble  peak activations  peak bytes
        0        0 5      30       6  16.7 %                 6    5.86 KiB
        1        1 4      30       6  16.7 %                 6    5.86 KiB
        2        2 3      30       6  16.7 %                 6    5.86 KiB
    """)


def test_summary_of_nothing_is_an_empty_table() -> None:
    assert printed(summary_table({})).split() == [
        "schedule",
        "end",
        "time",
        "s",
        "ratio",
        "bubble",
        "peak",
        "microbatches",
    ]


def test_of_many_ranks_only_the_first_and_the_last_are_listed() -> None:
    rows = [line.split() for line in printed(rank_table(timeline_of("1F1B", 40, 2))).splitlines()]
    expected = [*map(str, range(16)), "...", *map(str, range(24, 40))]
    assert [row[0] for row in rows[1:]] == expected
    assert rows[17] == ["...", "8", "more"]
