import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedules.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble
from penstock.schedules.zero_bubble import zero_bubble_h1
from penstock.sim.engine import simulate
from tests.schedules.tables import read_table


def test_stages_of_a_rank_take_turns_in_rounds() -> None:
    assert interleaved_one_f_one_b(2, 2) == read_table(
        "0F0 0F1 2F0 2F1         2B0         2B1     0B0     0B1",
        "    1F0 1F1 3F0 3B0     3F1 3B1     1B0     1B1",
    )


def test_microbatches_that_fill_no_round_make_a_round_larger() -> None:
    assert interleaved_one_f_one_b(2, 3) == read_table(
        "0F0 0F1 0F2 2F0 2F1 2F2     2B0         2B1         2B2     0B0     0B1     0B2",
        "    1F0 1F1 1F2 3F0 3B0     3F1 3B1     3F2 3B2     1B0     1B1     1B2",
    )


def test_larger_rounds_come_first() -> None:
    order = interleaved_one_f_one_b(2, 5).order(0)
    forwards = [text for text in map(str, order) if "F" in text]
    assert " ".join(forwards) == "0F0 0F1 0F2 2F0 2F1 2F2 0F3 0F4 2F3 2F4"


@given(
    ranks=st.integers(1, 8),
    rounds=st.integers(1, 4),
    stages_per_rank=st.integers(1, 3),
)
@settings(derandomize=True, deadline=None)
def test_bubble_shrinks_with_stages_per_rank_as_megatron_says(
    ranks: int, rounds: int, stages_per_rank: int
) -> None:
    # bubble / ideal = (p - 1) / (v m) for microbatches in whole rounds of p.
    microbatches = ranks * rounds
    timeline = simulate(interleaved_one_f_one_b(ranks, microbatches, stages_per_rank))
    ideal = timeline.busy_seconds[0]
    expected = (ranks - 1) / (stages_per_rank * microbatches)
    assert (timeline.longest_span - ideal) / ideal == pytest.approx(expected)


def test_weight_work_is_put_off_by_one_microbatch_per_rank() -> None:
    assert interleaved_zero_bubble(2, 3) == read_table(
        "0F0 0F1 0F2 2F0 2F1     2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2",
        "    1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2",
    )


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 16))
@settings(derandomize=True, deadline=None)
def test_zero_bubble_with_one_stage_per_rank_is_zb_h1(ranks: int, microbatches: int) -> None:
    assert interleaved_zero_bubble(ranks, microbatches, 1) == zero_bubble_h1(ranks, microbatches)
