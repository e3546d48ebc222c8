import pytest

from penstock.costs import Costs
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.schedules.v_shape import zbv
from penstock.sim.engine import simulate
from tests.facts import V_ORDER, VOrderRow
from tests.schedules.tables import read_table


def test_first_backward_starts_where_the_last_forward_ended_and_no_rank_waits() -> None:
    assert zbv(2, 3) == read_table(
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    )


def test_few_microbatches_keep_the_order_of_many() -> None:
    assert zbv(3, 1) == read_table(
        "0F0                 5F0 5I0 5W0                 0I0 0W0",
        "    1F0         4F0         4I0 4W0         1I0 1W0",
        "        2F0 3F0                 3I0 3W0 2I0 2W0",
    )


@pytest.mark.parametrize("ranks", range(1, 9))
def test_equal_costs_leave_no_bubble_once_the_v_is_full(ranks: int) -> None:
    rates = [simulate(zbv(ranks, 2 * ranks + more)).papers_bubble_rate for more in range(4)]
    assert rates == [0.0] * 4


@pytest.mark.parametrize("row", V_ORDER, ids=lambda row: row.model)
def test_published_bubble_rates_come_out_to_four_digits(row: VOrderRow) -> None:
    forward, backward_input, weight = row.forward, row.backward_input, row.backward_weight
    # Published are the costs of a stage, of which a rank has two; 1F1B runs them as one.
    whole = Costs(2 * forward, 2 * backward_input, 2 * weight, transfer=row.transfer)
    plain = simulate(one_f_one_b(row.ranks, row.microbatches), whole)
    folded = simulate(zbv(row.ranks, row.microbatches), whole)
    rates = [round(timeline.papers_bubble_rate, 4) for timeline in (plain, folded)]
    assert rates == [row.one_f_one_b, row.v_order]
