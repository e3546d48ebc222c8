"""Strict parsing: what is not an action is an error that names the cell."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ParseError
from penstock.ir.actions import Action, Kind, Overlap, Work
from penstock.ir.dataflow import Dataflow
from penstock.ir.text import format_csv, format_table, parse_csv, parse_work

NUMBERS = st.integers(0, 999_999_999)


@st.composite
def actions(draw: st.DrawFn, *, only_compute: bool = False) -> Action:
    kind = draw(st.sampled_from([k for k in Kind if k.is_compute or not only_compute]))
    return Action(
        kind,
        draw(NUMBERS),
        draw(NUMBERS) if kind.has_microbatch else None,
        draw(st.none() | NUMBERS) if kind.is_communication else None,
    )


OVERLAPS = st.lists(actions(only_compute=True), min_size=2, max_size=4).map(
    lambda members: Overlap(tuple(members))
)
WORKS: st.SearchStrategy[Work] = actions() | OVERLAPS


@given(WORKS)
def test_text_of_any_work_reads_back_as_that_work(work: Work) -> None:
    assert parse_work(str(work)) == work


@given(st.text())
def test_any_text_is_read_or_refused_as_no_action(text: str) -> None:
    try:
        work = parse_work(text)
    except ParseError:
        return
    assert parse_work(str(work)) == work


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("2F0", Action(Kind.FORWARD, 2, 0)),
        (" 12B345 ", Action(Kind.FULL_BACKWARD, 12, 345)),
        ("0SEND_F1>3", Action(Kind.SEND_F, 0, 1, 3)),
        ("0SEND_F1>1", Action(Kind.SEND_F, 0, 1)),
        ("1RESHARD", Action(Kind.RESHARD, 1)),
        ("999999999W999999999", Action(Kind.BACKWARD_WEIGHT, 999_999_999, 999_999_999)),
        (
            "( 0F3 ; 7B1 )OVERLAP_F_B",
            Overlap((Action(Kind.FORWARD, 0, 3), Action(Kind.FULL_BACKWARD, 7, 1))),
        ),
    ],
)
def test_text_is_read(text: str, work: Work) -> None:
    assert parse_work(text) == work


@pytest.mark.parametrize(
    "text",
    [
        "1F0garbage",
        "garbage1F0",
        "F0",
        "1X0",
        "1f0",
        "1 F0",
        "1F 0",
        "1F0 2F0",
        "-1F0",
        "1F-1",
        "1.0F0",
        "\N{ARABIC-INDIC DIGIT ONE}F0",
        "1F\N{ARABIC-INDIC DIGIT ZERO}",
        "\N{SUPERSCRIPT TWO}F0",
        "1\N{FULLWIDTH LATIN CAPITAL LETTER F}0",
        "1234567890F0",
        "0F1234567890",
        "0SEND_F0>1234567890",
        "0SEND_F0>",
        "0SEND_F0>-1",
        "0SEND0",
        "(0F0;1B0)",
        "(0F0;1B0)OVERLAP_F_Bx",
        "(0F0;1B0OVERLAP_F_B",
        "((0F0;1B0)OVERLAP_F_B;2F0)OVERLAP_F_B",
    ],
)
def test_invalid_action_is_refused(text: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_work(text)
    expected = f"not a valid action: {text!r} (expected STAGE KIND MICROBATCH, e.g. 2F0)"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1F", "not a valid action: '1F': F takes a microbatch (got None)"),
        ("1UNSHARD0", "not a valid action: '1UNSHARD0': UNSHARD takes no microbatch (got 0)"),
        ("1F0>2", "not a valid action: '1F0>2': F takes no peer (got 2)"),
        (
            "(0F0)OVERLAP_F_B",
            "not a valid overlap: '(0F0)OVERLAP_F_B': an overlap must hold "
            "two or more compute actions "
            "(got (0F0)OVERLAP_F_B)",
        ),
        (
            "(0F0;0SEND_F0)OVERLAP_F_B",
            "not a valid overlap: '(0F0;0SEND_F0)OVERLAP_F_B': an overlap must "
            "hold two or more compute "
            "actions (got (0F0;0SEND_F0)OVERLAP_F_B)",
        ),
        (
            "(0F0;)OVERLAP_F_B",
            "not a valid action: '' (expected STAGE KIND MICROBATCH, e.g. 2F0)",
        ),
    ],
)
def test_what_is_almost_an_action_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_work(text)
    assert str(caught.value) == message


def test_wrong_cell_of_a_csv_is_named() -> None:
    with pytest.raises(ParseError) as caught:
        parse_csv("0F0,,0B0\n1F0,1F0garbage\n")
    assert str(caught.value) == (
        "rank 1, cell 1: not a valid action: '1F0garbage' "
        "(expected STAGE KIND MICROBATCH, e.g. 2F0)"
    )


@given(st.lists(st.lists(WORKS, min_size=1, max_size=5), min_size=1, max_size=4))
def test_csv_reads_back_as_what_was_written(orders: list[list[Work]]) -> None:
    assert parse_csv(format_csv(orders, Dataflow.chain(2))) == (orders, None)


def test_dataflow_other_than_a_chain_goes_into_the_first_line() -> None:
    orders = [[Action(Kind.FORWARD, stage, 0)] for stage in range(3)]
    skip = Dataflow(3, [(0, 1), (1, 2), (0, 2)])
    text = format_csv(orders, skip)
    assert text == "# dataflow: 0>1 0>2 1>2 | parts: 0 1 2\n0F0\n1F0\n2F0\n"
    assert parse_csv(text) == (orders, skip)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "# nonsense",
            "not a valid dataflow: '# nonsense'; write # dataflow: 0>1 1>2 | parts: 0 1 2",
        ),
        (
            "# dataflow: 0>1",
            "not a valid dataflow: '# dataflow: 0>1'; write # dataflow: 0>1 1>2 | parts: 0 1 2",
        ),
        (
            "# dataflow: 0>x | parts: 0 1",
            "not a valid dataflow: '# dataflow: 0>x | parts: 0 1'; "
            "write # dataflow: 0>1 1>2 | parts: 0 1 2",
        ),
        (
            "# dataflow: 0>1>2 | parts: 0 1",
            "not a valid dataflow: '# dataflow: 0>1>2 | parts: 0 1'; "
            "write # dataflow: 0>1 1>2 | parts: 0 1 2",
        ),
        (
            "# dataflow: 01 | parts: 0 1",
            "not a valid dataflow: '# dataflow: 01 | parts: 0 1'; "
            "write # dataflow: 0>1 1>2 | parts: 0 1 2",
        ),
    ],
)
def test_first_line_with_an_invalid_dataflow_is_refused(line: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_csv(f"{line}\n0F0\n1F0\n")
    assert str(caught.value) == message


def test_table_has_ranks_across_and_positions_down() -> None:
    orders = [list(map(parse_work, line.split())) for line in ("0F0 0F10 0B0", "1F0")]
    assert (
        format_table(orders, first_position=9)
        == """\
    rank 0  rank 1
 9  0F0     1F0
10  0F10
11  0B0"""
    )
