import pytest
from hypothesis import given

from penstock.dropin.names.actions import UNSHARD, F, _Action
from penstock.dropin.names.lists import (
    OrderError,
    apply_to_rank,
    from_schedule,
    members,
    read_stage_ranks,
    to_actions,
    to_rows,
    to_schedule,
)
from penstock.dropin.orders.slots import fill_slots
from penstock.errors import ScheduleError
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.passes.send_recv import add_send_recv
from tests.dropin.incumbent import read_order
from tests.strategies import schedules


def test_members_of_an_overlap_are_its_sub_actions() -> None:
    (pair, single) = read_order("(0F1;0B0) 0B1")[0]
    assert pair is not None
    assert single is not None
    assert list(map(str, members(pair))) == ["0F1", "0B0"]
    assert members(single) == (single,)


def test_idle_slots_and_ranks_without_work_survive_the_way_there_and_back() -> None:
    order = read_order(". 0F0 . 2F0 .", "", ". .", "1F0")
    schedule = to_schedule(order, (0, 3, 0).__getitem__, 3)
    assert schedule.placement.rank_of_stage == (0, 3, 0, 0, 1, 2, 3)
    assert from_schedule(schedule, order) == read_order("0F0 2F0", "", "", "1F0")
    start = schedule.rows.rank_of_row() * 0.0 + [0, 1, 2, 3, 4, 0, 1, 0]
    assert fill_slots(schedule, start, order) == order


def test_ranks_may_have_any_numbers() -> None:
    order = {7: read_order("0F0")[0], 3: read_order("1F0")[0]}
    schedule = to_schedule(order, {0: 7, 1: 3}.__getitem__, 2)
    assert schedule.placement.rank_of_stage == (1, 0, 0, 1)
    assert from_schedule(add_send_recv(schedule), order) == {
        3: read_order("1RECV_F0 1F0")[0],
        7: read_order("0F0 0SEND_F0")[0],
    }


def test_stage_map_is_read_off_all_actions() -> None:
    order = read_order("0F0 (3F0;3B1) .", "1UNSHARD 2RECV_F0")
    assert read_stage_ranks(order) == {0: 0, 1: 1, 2: 1, 3: 0}


@pytest.mark.parametrize(
    ("lines", "holder", "message"),
    [
        (("0F0", "0F0"), (0, 1), "rank 1, position 0, 0F0: stage 0 also runs on rank 0"),
        (("0F0", "2F0"), (0, 1), "stage 2 on rank 1 must be below 2"),
        (("1F0", "0F0"), (0, 1), r"stage 0 must run on rank 0 \(got 1\)"),
        (("0F0",), (0, 1), "stage 1 belongs to rank 1, which has no list here"),
    ],
)
def test_stages_in_the_wrong_place_are_refused(
    lines: tuple[str, ...], holder: tuple[int, ...], message: str
) -> None:
    with pytest.raises(OrderError, match=message):
        to_schedule(read_order(*lines), holder.__getitem__, 2)


def test_passes_see_one_rank_with_its_stages_numbered_from_zero() -> None:
    seen = []

    def look(schedule: Schedule) -> Schedule:
        seen.append(str(schedule))
        return schedule

    slots = read_order("40F0 . (3F1;40B0) 3B1")[0]
    assert apply_to_rank(look, slots) == [slot for slot in slots if slot is not None]
    assert seen == ["   rank 0\n0  1F0\n1  (0F1;1B0)OVERLAP_F_B\n2  0B1"]
    assert apply_to_rank(look, [None, None]) == []


def lists_of(schedule: Schedule) -> list[list[_Action | None]]:
    return [[_Action.from_str(str(work)) for work in order] for order in schedule.orders]


@given(schedules(max_ranks=4, max_microbatches=6))
def test_columns_of_lists_are_those_of_our_own_actions(schedule: Schedule) -> None:
    for whole in (schedule, add_send_recv(schedule)):
        lists = lists_of(whole)
        rows, expected = to_rows(lists), Rows.from_works(whole.orders)
        assert rows.first.tolist() == expected.first.tolist()
        for column, wanted in zip(rows.columns, expected.columns, strict=True):
            assert (column.dtype, column.tolist()) == (wanted.dtype, wanted.tolist())
        assert [list(to_actions(rows, rank)) for rank in range(rows.num_ranks)] == lists


def test_actions_that_mean_nothing_have_no_columns() -> None:
    for action in (
        _Action(0, F, None),
        _Action(-1, F, 0),
        _Action(0, F, -1),
        _Action(0, UNSHARD, 0),
        _Action(-1, F, None, (_Action(0, F, 0),)),
    ):
        with pytest.raises(ScheduleError):
            to_rows([[action]])
