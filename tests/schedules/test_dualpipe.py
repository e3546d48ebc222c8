import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs import Costs
from penstock.errors import SizeError
from penstock.ir.dataflow import Dataflow
from penstock.schedules.dualpipe import dualpipe, dualpipe_v
from penstock.sim.engine import simulate
from tests.schedules.tables import read_table


def test_forwards_and_backwards_of_a_folded_pipe_overlap() -> None:
    assert dualpipe_v(2, 4) == read_table(
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3",
        "    1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3",
    )


def test_overlap_that_loses_a_half_to_few_microbatches_runs_alone() -> None:
    assert dualpipe_v(2, 3) == read_table(
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1             (3F2;0B0)   3B2 0B1        0I2 0W2",
        "    1F0 2F0 1F1 2F1 1F2 2B0     (2F2;1B0)   2B1 1B1     2B2     1B2",
    )


def test_microbatches_enter_two_copies_of_the_model_from_both_ends() -> None:
    assert dualpipe(2, 4) == read_table(
        "0F0 3F2 0F1 3B2 (3F3;0B0) 3B3 0I1 0W1",
        "2F2 1F0 2F3 1B0 (1F1;2B2) 1B1 2I3 2W3",
        dataflow=Dataflow.copies(2, 2),
    )


def test_odd_number_of_microbatches_gives_the_first_end_one_more() -> None:
    assert dualpipe(2, 3) == read_table(
        "0F0 3F2 0F1 3B2 0B0     0I1 0W1",
        "2F2 1F0 1B0 (1F1;2B2) 1B1",
        dataflow=Dataflow.copies(2, 2),
    )


# The authors count the overlap of F and B as one piece, F&B, and B as I and W together. Their
# bubble (PP / 2 - 1)(F&B + B - 3 W) holds where F and I take equally long, and W no longer.
EQUAL_SECONDS = st.integers(1, 20).flatmap(
    lambda weight: st.tuples(st.integers(weight, 40), st.just(weight))
)


def published_bubble(depths: int, forward: int, weight: int) -> int:
    backward = forward + weight
    return (depths - 1) * (forward + backward + backward - 3 * weight)


@given(half=st.integers(1, 4), more=st.integers(0, 8), seconds=EQUAL_SECONDS)
@settings(derandomize=True, deadline=None)
def test_bubble_of_dualpipe_is_the_published_one(
    half: int, more: int, seconds: tuple[int, int]
) -> None:
    forward, weight = seconds
    schedule = dualpipe(2 * half, 4 * half + 2 * more)
    timeline = simulate(schedule, Costs(forward, forward, weight))
    assert timeline.repeat("papers").idle_seconds[0] == published_bubble(half, forward, weight)


@given(ranks=st.integers(1, 8), more=st.integers(0, 8), seconds=EQUAL_SECONDS)
@settings(derandomize=True, deadline=None)
def test_bubble_of_dualpipe_v_is_the_published_one_for_twice_the_ranks(
    ranks: int, more: int, seconds: tuple[int, int]
) -> None:
    forward, weight = seconds
    schedule = dualpipe_v(ranks, 2 * ranks + more)
    costs = Costs(forward, forward, weight).for_each_stage(2 * ranks)
    timeline = simulate(schedule, costs)
    assert timeline.repeat("papers").idle_seconds[0] == published_bubble(ranks, forward, weight)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_published_number_of_activations_is_held(ranks: int) -> None:
    # PP + 1 for DualPipe; PP counts stages, so 2 * ranks + 1 for DualPipeV.
    both_ends = simulate(dualpipe(ranks, 2 * ranks)).rank_peak_activations
    folded = simulate(dualpipe_v(ranks, 2 * ranks)).rank_peak_activations
    assert (both_ends, folded) == ((ranks + 1,) * ranks, (2 * ranks + 1,) * ranks)


@pytest.mark.parametrize(("ranks", "fewer", "more"), [(1, 2, 2), (3, 2, 4), (7, 6, 8)])
def test_odd_number_of_ranks_is_refused(ranks: int, fewer: int, more: int) -> None:
    with pytest.raises(SizeError) as caught:
        dualpipe(ranks, 8)
    assert str(caught.value) == (
        f"DualPipe needs an even number of ranks (ranks: {ranks}); "
        f"use {fewer} or {more}, or DualPipeV"
    )


def test_single_microbatch_is_refused() -> None:
    with pytest.raises(SizeError) as caught:
        dualpipe(2, 1)
    assert str(caught.value) == (
        "DualPipe feeds both ends (microbatches: 1); use 2 or more, or DualPipeV"
    )
