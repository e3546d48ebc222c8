import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs import Costs
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2
from penstock.sim.engine import simulate
from tests.facts import ZERO_BUBBLE, ZeroBubbleRow
from tests.schedules.tables import read_table


def test_h1_puts_weight_work_off_by_one_microbatch_per_rank() -> None:
    assert zero_bubble_h1(3, 5) == read_table(
        "0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4",
        "    1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4",
        "        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4",
    )


def test_h2_runs_twice_as_far_ahead_and_never_waits() -> None:
    assert zero_bubble_h2(3, 5) == read_table(
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
        "    1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4",
        "        2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
    )


def test_fewer_microbatches_than_ranks_leave_all_weight_work_to_the_end_of_the_last_rank() -> None:
    assert zero_bubble_h1(3, 2) == read_table(
        "0F0 0F1             0I0 0W0 0I1 0W1",
        "    1F0 1F1     1I0     1I1 1W0 1W1",
        "        2F0 2I0 2F1 2I1 2W0 2W1",
    )


@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: row.model)
def test_published_bubble_rates_come_out_to_four_digits(row: ZeroBubbleRow) -> None:
    costs = Costs(row.forward, row.backward_input, row.backward_weight, transfer=row.transfer)
    families = (one_f_one_b, zero_bubble_h1, zero_bubble_h2)
    rates = [simulate(f(row.ranks, row.microbatches), costs).papers_bubble_rate for f in families]
    assert [round(rate, 4) for rate in rates] == [row.one_f_one_b, row.zb_h1, row.zb_h2]


# Seconds of F, I and W with W the shortest: the premise of the closed forms of H1 and H2.
SECONDS = st.integers(1, 20).flatmap(
    lambda weight: st.tuples(st.integers(weight, 40), st.integers(weight, 40), st.just(weight))
)


@given(ranks=st.integers(1, 8), more=st.integers(0, 8), seconds=SECONDS)
@settings(derandomize=True, deadline=None)
def test_h1_takes_one_weight_work_per_hop_from_the_bubble(
    ranks: int, more: int, seconds: tuple[int, int, int]
) -> None:
    # (p - 1)(F + I - W) seconds, from m = p microbatches on.
    forward, backward_input, weight = seconds
    timeline = simulate(zero_bubble_h1(ranks, ranks + more), Costs(*seconds))
    assert timeline.repeat("papers").idle_seconds[0] == (ranks - 1) * (
        forward + backward_input - weight
    )


@given(ranks=st.integers(1, 8), more=st.integers(0, 8), seconds=SECONDS)
@settings(derandomize=True, deadline=None)
def test_h2_takes_two_weight_works_per_hop_from_the_bubble(
    ranks: int, more: int, seconds: tuple[int, int, int]
) -> None:
    # (p - 1)(F + I - 2W) seconds, from m = 2p - 1 microbatches on.
    forward, backward_input, weight = seconds
    timeline = simulate(zero_bubble_h2(ranks, 2 * ranks - 1 + more), Costs(*seconds))
    assert timeline.repeat("papers").idle_seconds[0] == (ranks - 1) * (
        forward + backward_input - 2 * weight
    )
