import pytest
from hypothesis import given

from penstock.dropin.names.actions import UNSHARD, F, _Action
from penstock.dropin.names.columns import to_actions, to_rows
from penstock.errors import ScheduleError
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.passes.send_recv import add_send_recv
from tests.strategies import schedules


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
