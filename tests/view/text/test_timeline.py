import io
from textwrap import dedent

import numpy as np
import pytest
from rich.console import Console

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.palette import LOOKS, shade
from penstock.view.text.timeline import TimelinePicture, colour_timeline, plain_timeline
from tests.view.timelines import EVERY_FAMILY, EVERY_NAME, timeline_of

CONSOLE = Console(file=io.StringIO(), width=100, color_system=None)
SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
OVERLAP = Schedule.from_orders([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])


def picture(text: str) -> str:
    """Remove the indentation of the test from an expected picture."""
    return dedent(text).strip("\n")


def with_times(order: list[str], start: list[float], end: list[float]) -> Timeline:
    """Return a timeline of one rank with the given times."""
    schedule = Schedule.from_orders([order])
    return Timeline(schedule, np.array(start), np.array(end), np.zeros(len(start)))


def test_1f1b_in_letters() -> None:
    view = plain_timeline(timeline_of("1F1B", 4, 8), width=80)
    assert view.plain == picture("""
        rank 0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--
        rank 1  ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....
        rank 2  ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........
        rank 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............
                |0 s      |5        |10       |15       |20       |25       |30
                F Forward   B Full backward   . Idle
    """)


def test_1f1b_in_colour_has_the_same_numbers_in_the_same_columns() -> None:
    view = colour_timeline(timeline_of("1F1B", 4, 8), width=80)
    # The bars of the last backwards end in spaces, which editors strip.
    assert "\n".join(line.rstrip() for line in view.plain.splitlines()) == picture("""
        rank 0  0 1 2 3 ············0   4 1   5 2   6 3   7 4   ··5   ··6   ··7
        rank 1  ··0 1 2 ········0   3 1   4 2   5 3   6 4   7 5   ··6   ··7   ····
        rank 2  ····0 1 ····0   2 1   3 2   4 3   5 4   6 5   7 6   ··7   ········
        rank 3  ······0 0   1 1   2 2   3 3   4 4   5 5   6 6   7 7   ············
                |0 s      |5        |10       |15       |20       |25       |30
                   Forward      Full backward   ·· Idle
    """)


def test_v_placement_has_later_stages_in_lower_case() -> None:
    view = plain_timeline(timeline_of("ZBV", 2, 4), width=80)
    assert view.plain == picture("""
        rank 0  F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2I1W1f3i3w3I2W2I3W3..
        rank 1  ..F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2I2i3I3W2w3W3
                |0 s    |2      |4      |6      |8      |10
                F Forward   I Backward input   W Backward weight   . Idle
                lower case: later stages
    """)


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (20, "rank 0  F0(F1&&B0)B1--"),
        (14, "rank 0  F(F&B)B1"),
        (26, "rank 0  F0-(F1&&&&&B0)B1----"),
    ],
)
def test_overlapped_pair_in_letters_has_its_forward_left_and_its_backward_right(
    width: int, line: str
) -> None:
    # The brackets only help the reader.
    view = plain_timeline(simulate(OVERLAP), width=width)
    expected = line.replace("(", "").replace(")", "")
    assert view.plain.splitlines()[0] == expected


def test_overlapped_pair_in_colour_has_its_forward_in_the_upper_half() -> None:
    view = colour_timeline(simulate(OVERLAP), width=20)
    assert view.plain.splitlines()[0] == "rank 0  0 1▀▀▀▀01   "
    styles = [str(view.get_style_at_offset(CONSOLE, offset)) for offset in range(8, 20)]
    forward, backward = LOOKS[Kind.FORWARD].colour, LOOKS[Kind.FULL_BACKWARD].colour
    on_forward, on_backward = f"#ffffff on {forward}", f"#ffffff on {backward}"
    halves = f"{forward} on {backward}"
    assert styles == [*[on_forward] * 3, *[halves] * 4, *[on_backward] * 5]


def test_later_stages_are_lighter_in_colour() -> None:
    view = colour_timeline(timeline_of("ZBV", 1, 1), width=80)
    backgrounds = {
        str(style.bgcolor.name)
        for offset in range(8, 80)
        if (style := view.get_style_at_offset(CONSOLE, offset)).bgcolor is not None
    }
    # One microbatch through two stages on one rank, with the backward split.
    assert backgrounds == {shade(kind, at, 2) for kind in SPLIT for at in range(2)}


def test_column_with_several_actions_shows_the_longest() -> None:
    view = plain_timeline(timeline_of("GPipe", 2, 40), width=20)
    # 123 units of time in 12 columns; backwards take twice as long as forwards.
    assert view.plain.splitlines()[:2] == ["rank 0  FFFFBBBBBBBB", "rank 1  FFFFBBBBBBBB"]


def test_column_is_idle_only_if_most_of_it_is_idle() -> None:
    # The second of ten columns has 0.6 forward and 0.4 idle, the third is idle for 0.6.
    timeline = with_times(["0F0", "0B0"], start=[0.0, 2.6], end=[1.6, 10.0])
    view = plain_timeline(timeline, width=18)
    assert view.plain.splitlines()[0] == "rank 0  F0.B0-----"


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_line_fits_the_width(name: str) -> None:
    timeline = EVERY_FAMILY[name]
    for view in (colour_timeline(timeline, width=80), plain_timeline(timeline, width=80)):
        lines = view.plain.splitlines()
        ranks = timeline.schedule.num_ranks
        assert max(map(len, lines)) <= 80
        assert len({len(line) for line in lines[:ranks]}) == 1


@pytest.mark.parametrize("name", EVERY_NAME)
def test_share_of_idle_cells_is_the_share_of_idle_time(name: str) -> None:
    timeline = EVERY_FAMILY[name]
    ranks = timeline.schedule.num_ranks
    lines = plain_timeline(timeline, width=1000).plain.splitlines()[:ranks]
    cells = "".join(line.split(maxsplit=2)[2] for line in lines)
    busy = sum(timeline.busy_seconds) / (ranks * timeline.end_time)
    assert cells.count(".") / len(cells) == pytest.approx(1 - busy, abs=0.03)


def test_sixty_four_ranks_have_one_line_each() -> None:
    view = plain_timeline(timeline_of("ZBV", 64, 128), width=80)
    lines = view.plain.splitlines()
    assert [line.split()[1] for line in lines[:64]] == [str(rank) for rank in range(64)]
    assert len(lines) == 64 + 3


def test_lowered_schedule_looks_like_the_plain_one() -> None:
    schedule = build("DualPipeV", ranks=4, microbatches=10)
    plain, lowered = (plain_timeline(simulate(s), width=100) for s in (schedule, lower(schedule)))
    assert lowered == plain


def test_recorded_times_may_start_at_any_offset() -> None:
    early = with_times(["0F0", "0B0"], start=[0.0, 1.0], end=[1.0, 3.0])
    late = with_times(["0F0", "0B0"], start=[700.0, 701.0], end=[701.0, 703.0])
    views = [plain_timeline(timeline, width=40) for timeline in (early, late)]
    assert views[0] == views[1]


def test_timeline_of_zero_length_is_idle() -> None:
    costs = Costs(forward=0, backward_input=0, backward_weight=0)
    view = plain_timeline(timeline_of("GPipe", 2, 2, costs), width=20)
    assert view.plain == picture("""
        rank 0  ............
        rank 1  ............
                |0 s
                . Idle
    """)


@pytest.mark.parametrize(
    ("console", "is_plain"),
    [
        (Console(width=80, force_terminal=True, color_system="truecolor", no_color=False), False),
        (Console(width=80, force_terminal=True, color_system="256", no_color=False), False),
        (Console(width=80, force_terminal=True, color_system="truecolor", no_color=True), True),
        # Sixteen colours are too few to tell the kinds of action apart.
        (Console(width=80, force_terminal=True, color_system="standard", no_color=False), True),
        (Console(width=80, force_terminal=False), True),
    ],
)
def test_picture_has_colours_if_the_console_has_enough(console: Console, is_plain: bool) -> None:
    timeline = timeline_of("1F1B", 2, 2)
    drawn = list(console.render(TimelinePicture(timeline)))
    expected = plain_timeline if is_plain else colour_timeline
    assert drawn == list(console.render(expected(timeline, width=80)))
