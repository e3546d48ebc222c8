"""What holds for every pass: it leaves its input alone, and the order of compute with it."""

from collections.abc import Callable

import pytest
from hypothesis import given

from penstock.assembly import lower
from penstock.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.passes.backward import merge_backward, split_backward
from penstock.passes.overlap import overlap_forward_backward
from penstock.passes.reduce_grad import add_reduce_grad
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.passes.shard import add_unshard_reshard
from tests.strategies import every_family, schedules
from tests.tables import orders_of

PASSES: dict[str, Callable[[Schedule], Schedule]] = {
    "merge_backward": merge_backward,
    "split_backward": split_backward,
    "overlap_forward_backward": overlap_forward_backward,
    "add_reduce_grad": add_reduce_grad,
    "add_send_recv": add_send_recv,
    "add_send_recv_by_cost": lambda schedule: add_send_recv_by_cost(schedule, Costs(transfer=1)),
    "delay_receives": delay_receives,
    "add_unshard_reshard": add_unshard_reshard,
    "lower": lower,
}


@pytest.mark.parametrize("name", PASSES)
def test_pass_leaves_its_input_as_it_was_and_keeps_all_but_the_order(name: str) -> None:
    for schedule in every_family(4, 6):
        before = orders_of(schedule)
        result = PASSES[name](schedule)
        assert orders_of(schedule) == before
        assert result.name == schedule.name
        assert result.placement == schedule.placement
        assert result.dataflow == schedule.dataflow
        assert result.microbatches == schedule.microbatches


@given(schedules())
def test_lowering_keeps_the_order_of_compute(schedule: Schedule) -> None:
    rows = lower(schedule).rows
    computes = rows.keep(rows.is_compute)
    kept = tuple(tuple(computes.works(rank)) for rank in range(schedule.num_ranks))
    assert kept == schedule.orders
