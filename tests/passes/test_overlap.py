"""Forwards and backwards side by side that run together."""

import pytest
from hypothesis import given

from penstock.checks.report import find_problems
from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.passes.overlap import overlap_forward_backward
from tests.strategies import schedules
from tests.tables import orders_of, read_orders, read_schedule


def overlapped(picture: str) -> list[list[str]]:
    return orders_of(overlap_forward_backward(read_schedule(picture)))


def test_forward_is_joined_with_the_backward_after_it() -> None:
    picture = """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    expected = """
        0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    assert overlapped(picture) == read_orders(expected)


def test_pairs_that_would_wait_for_one_another_stay_apart() -> None:
    # 0F1 feeds 1F1, and 1B0 feeds 0B0: neither pair could be the first to start.
    picture = """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    assert overlapped(picture) == read_orders(picture)


def test_forward_and_backward_of_one_microbatch_stay_apart() -> None:
    picture = "0F0 1F0 1B0 0B0"
    assert overlapped(picture) == read_orders(picture)


def test_existing_overlaps_stay_unchanged() -> None:
    # A forward was once joined with a backward that was in an overlap already, making three.
    picture = "0F0 0F1 0F2 (0B0;0F3)OVERLAP_F_B 0B1 0B2 0B3"
    assert overlapped(picture) == read_orders(picture)


def test_order_that_never_finishes_is_refused() -> None:
    # With no pair left to take apart, the search once never ended.
    with pytest.raises(ScheduleError) as caught:
        overlapped("0F0 0B0\n1B0 1F0")
    assert str(caught.value) == "the order never finishes, so nothing can overlap; check it first"


@given(schedules())
def test_overlapped_schedule_is_fine_and_holds_the_same_actions(schedule: Schedule) -> None:
    result = overlap_forward_backward(schedule)
    assert find_problems(result) == ()
    for before, after in zip(schedule.rows.columns[:4], result.rows.columns[:4], strict=True):
        assert before.tolist() == after.tolist()
    assert (result.rows.joined >= schedule.rows.joined).all()
