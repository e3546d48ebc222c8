"""Schedules with fewer microbatches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import lower
from penstock.checks.report import check
from penstock.errors import SizeError
from penstock.ir.schedule import Schedule
from penstock.passes.thin import thin_out
from tests.strategies import schedules
from tests.tables import orders_of, read_orders, read_schedule

WHOLE = """
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_last_microbatches_are_taken_out_and_the_rest_keeps_its_order() -> None:
    thinned = thin_out(read_schedule(WHOLE), 2)
    expected = """
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """
    assert orders_of(thinned) == read_orders(expected)
    assert thinned.microbatches == 2


def test_schedule_with_all_its_microbatches_stays_unchanged() -> None:
    assert thin_out(read_schedule(WHOLE), 3) == read_schedule(WHOLE)


def test_work_of_a_stage_as_a_whole_stays() -> None:
    picture = "0UNSHARD 0F0 0F1 0B0 0B1 0REDUCE_GRAD 0RESHARD"
    expected = "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD"
    assert orders_of(thin_out(read_schedule(picture), 1)) == read_orders(expected)


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "0F0 0B0"),
        ("0F0 0F1 (0B1;0B0)OVERLAP_F_B", "0F0 0B0"),
        ("0F0 0F1 0F2 (0B0;0B1)OVERLAP_F_B 0B2", "0F0 0F1 (0B0;0B1)OVERLAP_F_B"),
        ("0F0 0F1 0F2 (0B0;0B1;0B2)OVERLAP_F_B", "0F0 0F1 (0B0;0B1)OVERLAP_F_B"),
        ("0F0 0F1 0F2 (0B0;0B2;0B1)OVERLAP_F_B", "0F0 0F1 (0B0;0B1)OVERLAP_F_B"),
        ("0F0 0F1 0F2 (0B2;0B0;0B1)OVERLAP_F_B", "0F0 0F1 (0B0;0B1)OVERLAP_F_B"),
    ],
)
def test_overlap_keeps_what_is_left_of_it(picture: str, expected: str) -> None:
    microbatches = 2 if "F2" in picture else 1
    assert orders_of(thin_out(read_schedule(picture), microbatches)) == read_orders(expected)


@pytest.mark.parametrize("microbatches", [0, 4])
def test_number_that_the_schedule_does_not_have_is_refused(microbatches: int) -> None:
    with pytest.raises(SizeError) as caught:
        thin_out(read_schedule(WHOLE), microbatches)
    assert str(caught.value) == (
        f"microbatches must be from 1 to the schedule's 3 (got {microbatches}); "
        "build a schedule for that many"
    )


@given(schedules(), st.data())
def test_what_is_left_of_a_valid_schedule_is_valid(
    schedule: Schedule, data: st.DataObject
) -> None:
    microbatches = data.draw(st.integers(1, schedule.microbatches))
    check(thin_out(schedule, microbatches))
    check(thin_out(lower(schedule), microbatches))
