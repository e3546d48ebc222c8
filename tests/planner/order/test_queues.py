import numpy as np
import pytest

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.order.queues import Queues
from penstock.planner.problem import SchedulingProblem

COSTS = Costs(
    forward=(1, 2, 3, 4),
    backward_input=5,
    backward_weight=6,
    transfer=((0, 0.25), (0.5, 0)),
    activation_bytes=8,
    weight_stash_bytes=3,
).for_each_stage(4)


def v_queues(microbatches: int = 2) -> Queues:
    return Queues(SchedulingProblem.of(COSTS, Placement.v(2), microbatches, memory=20))


def test_columns_say_what_each_queue_takes_and_gives() -> None:
    queues = v_queues()
    assert queues.seconds[:, 0].tolist() == [1, 2, 3, 4, 5, 5, 5, 5, 6, 6, 6, 6]
    assert queues.change[:, 0].tolist() == [8, 8, 8, 8, -5, -5, -5, -5, -3, -3, -3, -3]
    # Two activations and a stash are 19 bytes, and no sum is 20.
    assert queues.capacity == pytest.approx([19, 19])
    assert (queues.num_rows, queues.cycle) == (24, 27)


def test_forwards_feed_the_next_stage_and_backwards_the_one_before() -> None:
    queues = v_queues()
    assert queues.follower.tolist() == [1, 2, 3, 7, -1, 4, 5, 6, -1, -1, -1, -1]
    # Stages 1 and 2 share a rank, so nothing travels between them.
    assert queues.lag[:, 0].tolist() == [0.25, 0, 0.5, 0, 0, 0.5, 0, 0.25, 0, 0, 0, 0]


def test_ranks_have_the_queues_of_their_stages() -> None:
    first, queues = v_queues().of_rank
    assert first.tolist() == [0, 6, 12]
    assert queues.tolist() == [0, 4, 8, 3, 7, 11, 1, 5, 9, 2, 6, 10]
    assert v_queues().holder.tolist() == [0, 1, 1, 0] * 3


def test_an_order_of_queues_is_a_schedule_with_its_microbatches_counted() -> None:
    order = np.array([0, 0, 3, 7, 3, 7, 4, 4, 8, 8, 11, 11, 1, 2, 1, 2, 6, 5, 6, 5, 9, 9, 10, 10])
    schedule = v_queues().to_schedule(order, "mine")
    assert [" ".join(map(str, works)) for works in schedule.orders] == [
        "0F0 0F1 3F0 3I0 3F1 3I1 0I0 0I1 0W0 0W1 3W0 3W1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 1W0 1W1 2W0 2W1",
    ]
    assert (schedule.name, schedule.placement) == ("mine", Placement.v(2))
