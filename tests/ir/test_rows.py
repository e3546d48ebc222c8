"""Work as columns of numbers."""

import numpy as np
import pytest

from penstock.ir.actions import Kind
from penstock.ir.rows import Rows, insert_rows
from penstock.ir.text import parse_work
from tests.tables import Orders, read_orders

PICTURE = """
    0F0 (0F1;0B0)OVERLAP_F_B 0SEND_F1>3 0B1
    1UNSHARD 1F0
"""


def rows_of(picture: str) -> Rows:
    return Rows.from_works([list(map(parse_work, order)) for order in read_orders(picture)])


def texts(rows: Rows) -> Orders:
    return [list(map(str, rows.works(rank))) for rank in range(rows.num_ranks)]


def test_columns_hold_one_row_per_action() -> None:
    rows = rows_of(PICTURE)
    absent = -1
    assert rows.first.tolist() == [0, 5, 7]
    assert [Kind(kind).text for kind in rows.kind] == [
        "F",
        "F",
        "B",
        "SEND_F",
        "B",
        "UNSHARD",
        "F",
    ]
    assert rows.stage.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert rows.microbatch.tolist() == [0, 1, 0, 1, 1, absent, 0]
    assert rows.peer.tolist() == [absent, absent, absent, 3, absent, absent, absent]
    assert rows.joined.tolist() == [False, False, True, False, False, False, False]
    assert texts(rows) == read_orders(PICTURE)


def test_position_counts_an_overlap_as_one_place() -> None:
    rows = rows_of(PICTURE)
    places = [(0, 0), (0, 1), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    assert [rows.position(row) for row in range(len(rows))] == places
    assert [rows.rank(row) for row in range(len(rows))] == rows.rank_of_row().tolist()
    assert rows.opening_row().tolist() == [0, 1, 1, 3, 4, 5, 6]
    assert rows.in_overlap().tolist() == [False, True, True, False, False, False, False]


def test_part_of_a_rank_is_read_by_its_rows() -> None:
    rows = rows_of(PICTURE)
    assert list(map(str, rows.works(0, 1, 4))) == ["(0F1;0B0)OVERLAP_F_B", "0SEND_F1>3"]
    assert str(rows.action(2)) == "0B0"
    assert [rows.of_rank(rank) for rank in range(rows.num_ranks)] == [range(5), range(5, 7)]


def test_rows_are_asked_for_their_kinds() -> None:
    rows = rows_of(PICTURE)
    wanted = [True, True, False, False, False, True, True]
    assert rows.is_kind(Kind.FORWARD, Kind.UNSHARD).tolist() == wanted
    assert rows.has_kind(Kind.SEND_F)
    assert not rows.has_kind(Kind.RECV_F, Kind.RESHARD)


def test_compute_rows_are_forwards_and_backwards() -> None:
    rows = rows_of("0UNSHARD 0F0 0SEND_F0 0RECV_B0 0I0 0W0 0B1 0REDUCE_GRAD 0RESHARD")
    assert texts(rows.keep(rows.is_compute)) == [["0F0", "0I0", "0W0", "0B1"]]


def test_activation_is_held_from_its_forward_to_its_full_or_weight_backward() -> None:
    rows = rows_of("0F0 0F1 0SEND_F1 0I0 0W0 0B1 0REDUCE_GRAD")
    assert np.cumsum(rows.held_change).tolist() == [1, 2, 2, 2, 1, 0, 0]


def test_rows_that_are_kept_stay_on_their_ranks() -> None:
    rows = rows_of(PICTURE)
    assert texts(rows.keep(rows.is_kind(Kind.FORWARD))) == [["0F0", "0F1"], ["1F0"]]
    assert texts(rows.keep(np.zeros(len(rows), dtype=np.bool_))) == [[], []]


def test_rows_are_put_in_before_others_of_the_same_rank() -> None:
    rows = rows_of("0F0 0B0\n1F0 1B0")
    new = rows_of("0UNSHARD 0REDUCE_GRAD 0RESHARD\n1UNSHARD 1RESHARD")
    # Row 2 is both one past the end of rank 0 and the first of rank 1.
    before = np.array([0, 2, 2, 2, 4])
    assert texts(insert_rows(rows, before, new)) == [
        ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD"],
        ["1UNSHARD", "1F0", "1B0", "1RESHARD"],
    ]
    assert texts(rows) == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_rank_may_be_empty() -> None:
    rows = rows_of("0F0")
    empty = Rows.from_works([[], *([list(rows.works(0))]), []])
    assert empty.first.tolist() == [0, 0, 1, 1]
    assert texts(empty) == [[], ["0F0"], []]


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_columns_of_moves_are_the_columns_of_works(stop: int) -> None:
    rows = rows_of("0F0 (0F1;0B0)OVERLAP_F_B 0F2 0B1").keep(np.arange(5) < stop)
    made = Rows.from_moves([stop], rows.kind, rows.stage, rows.microbatch, rows.joined.copy())
    assert texts(made) == texts(rows)
