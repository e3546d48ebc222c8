"""Gradient reduction."""

from hypothesis import given

from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.passes.reduce_grad import add_reduce_grad
from tests.strategies import schedules
from tests.tables import orders_of, read_orders, read_schedule


def reduced(picture: str) -> list[list[str]]:
    return orders_of(add_reduce_grad(read_schedule(picture)))


def test_each_stage_is_reduced_after_its_last_backward() -> None:
    picture = """
        0F0 0F1 3F0 3F1 3I0 0I0 3B1 0B1 3W0 0W0
        1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1
    """
    expected = """
        0F0 0F1 3F0 3F1 3I0 0I0 3B1 0B1 3W0 3REDUCE_GRAD 0W0 0REDUCE_GRAD
        1F0 1F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD 1B0 1B1 1REDUCE_GRAD
    """
    assert reduced(picture) == read_orders(expected)


def test_reduction_follows_the_overlap_that_holds_the_last_backward() -> None:
    picture = "0F0 1F0 (0B0;1B0)OVERLAP_F_B"
    expected = "0F0 1F0 (0B0;1B0)OVERLAP_F_B 0REDUCE_GRAD 1REDUCE_GRAD"
    assert reduced(picture) == read_orders(expected)


def test_schedule_without_backwards_reduces_nothing() -> None:
    picture = "0F0 0F1\n1F0 1F1"
    assert reduced(picture) == read_orders(picture)


@given(schedules())
def test_every_stage_with_a_backward_is_reduced_once_after_the_last(schedule: Schedule) -> None:
    rows = add_reduce_grad(schedule).rows
    assert rows.keep(~rows.is_kind(Kind.REDUCE_GRAD)).kind.tolist() == schedule.rows.kind.tolist()
    for stage in range(schedule.num_stages):
        kinds = [Kind(kind) for kind in rows.kind[rows.stage == stage]]
        times = 0 if schedule.is_forward_only else 1
        assert kinds.count(Kind.REDUCE_GRAD) == times
        assert kinds[-1] is Kind.REDUCE_GRAD or schedule.is_forward_only
