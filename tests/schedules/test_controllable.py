import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs import Costs
from penstock.schedules.controllable import v_half, v_min
from penstock.schedules.registry import find_family
from penstock.sim.engine import simulate
from tests.facts import CONTROLLABLE_MEMORY, ControllableMemoryRow
from tests.schedules.tables import read_table
from tests.strategies import examples

V_MIN_OF_THREE = read_table(
    "0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0         5F2 5I2 0I1 5W2 0W1     0I2 0W2",
    "    1F0 1F1     4F0     4F1 4I0 4W0 1F2 1I0 4I1 1W0 4W1 4F2     1I1 4I2 1W1 4W2 1I2 1W2",
    "        2F0 3F0 2F1 3F1         3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2",
)


def test_v_min_pulls_forwards_into_idle_slots_up_to_its_memory() -> None:
    assert v_min(3, 3) == V_MIN_OF_THREE


def test_v_half_over_two_ranks_never_waits() -> None:
    assert v_half(2, 3) == read_table(
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2",
        "    1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    )


def test_one_rank_finishes_each_microbatch_before_the_next() -> None:
    assert v_min(1, 2) == read_table("0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1")


@pytest.mark.parametrize("row", CONTROLLABLE_MEMORY, ids=lambda row: row.family)
def test_bubble_is_not_above_the_published_one(row: ControllableMemoryRow) -> None:
    schedule = find_family(row.family).generate(row.ranks, row.microbatches, 2)
    assert round(simulate(schedule).papers_bubble_rate, 4) <= row.bubble_rate


enough_examples = settings(max_examples=examples(25))
# Larger than the other families' sizes, since these orders are searched, not written down.
SIZES = {"ranks": st.integers(1, 24), "microbatches": st.integers(1, 48)}


@given(**SIZES)
@enough_examples
def test_v_min_holds_a_third_on_every_rank(ranks: int, microbatches: int) -> None:
    timeline = simulate(v_min(ranks, microbatches))
    limit = 2 * min((ranks + 4) // 3, microbatches)
    assert timeline.rank_peak_activations == (limit,) * ranks


@given(**SIZES)
@enough_examples
def test_v_half_holds_a_half_on_every_rank(ranks: int, microbatches: int) -> None:
    timeline = simulate(v_half(ranks, microbatches))
    limit = 2 * min((ranks + 2) // 2, microbatches)
    assert timeline.rank_peak_activations == (limit,) * ranks


@given(ranks=st.integers(1, 16), more=st.integers(1, 16))
@enough_examples
def test_bubble_of_v_min_is_about_four_slots_per_rank(ranks: int, more: int) -> None:
    # At equal costs, from m = p + 1 microbatches on; 4 p of 6 m slots is the 2 p / 3 m published.
    timeline = simulate(v_min(ranks, ranks + more), Costs(2, 2, 2))
    assert timeline.repeat("papers").idle_seconds[0] == max(
        0, 4 * ranks - (5 if ranks % 3 == 1 else 7)
    )


@given(ranks=st.integers(1, 16), more=st.integers(1, 16))
@enough_examples
def test_bubble_of_v_half_is_about_three_slots_per_rank(ranks: int, more: int) -> None:
    # At equal costs, from m = p + 1 microbatches on; 3 p of 6 m slots is the p / 2 m published.
    timeline = simulate(v_half(ranks, ranks + more), Costs(2, 2, 2))
    assert timeline.repeat("papers").idle_seconds[0] == max(0, 3 * ranks - (4 if ranks % 2 else 7))
