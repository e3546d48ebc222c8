from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs import Costs
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.sim.engine import simulate
from tests.schedules.tables import read_table

SIZES = {"ranks": st.integers(1, 8), "microbatches": st.integers(1, 16)}


def test_each_rank_runs_ahead_by_its_distance_from_the_last() -> None:
    assert one_f_one_b(3, 4) == read_table(
        "0F0 0F1 0F2                 0B0     0F3 0B1         0B2         0B3",
        "    1F0 1F1         1B0     1F2 1B1     1F3 1B2         1B3",
        "        2F0 2B0     2F1 2B1     2F2 2B2     2F3 2B3",
    )


def test_few_microbatches_are_all_run_ahead() -> None:
    assert one_f_one_b(4, 2) == read_table(
        "0F0 0F1                                 0B0         0B1",
        "    1F0 1F1                     1B0         1B1",
        "        2F0 2F1         2B0         2B1",
        "            3F0 3B0     3F1 3B1",
    )


@given(**SIZES)
@settings(derandomize=True, deadline=None)
def test_order_is_warm_up_then_one_forward_one_backward_then_drain(
    ranks: int, microbatches: int
) -> None:
    # torch's own table starts the last rank at microbatch 1, so the law is tested instead.
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        order = [f"{rank}F{number}" for number in range(ahead)]
        for number in range(microbatches - ahead):
            order += [f"{rank}F{ahead + number}", f"{rank}B{number}"]
        order += [f"{rank}B{number}" for number in range(microbatches - ahead, microbatches)]
        orders.append(" ".join(order))
    assert one_f_one_b(ranks, microbatches) == read_table(*orders)


@given(**SIZES, forward=st.integers(1, 20), backward=st.integers(1, 20))
@settings(derandomize=True, deadline=None)
def test_bubble_is_one_microbatch_per_rank_but_one(
    ranks: int, microbatches: int, forward: int, backward: int
) -> None:
    costs = Costs(forward=forward, full_backward=backward)
    timeline = simulate(one_f_one_b(ranks, microbatches), costs)
    assert timeline.repeat("papers").idle_seconds[0] == (ranks - 1) * (forward + backward)
