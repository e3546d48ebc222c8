"""The numbers that a timeline gives."""

import pytest

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.sim.engine import simulate
from penstock.sim.timeline import Span
from tests.tables import read_schedule

TWO_RANKS = read_schedule("""
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
""")


def test_timeline_knows_its_end_and_the_longest_span_of_a_rank() -> None:
    timeline = simulate(TWO_RANKS)
    assert timeline.rank_spans == (9, 6)
    assert timeline.longest_span == 9
    assert timeline.end_time == 9
    assert timeline.busy_seconds == (6, 6)
    assert timeline.idle_seconds == (3, 3)
    assert timeline.rank_bubble_rates == (3 / 9, 3 / 9)
    assert timeline.bubble_rate == 3 / 9


def test_bubble_rate_is_the_idle_share_of_all_ranks_and_the_papers_that_of_one() -> None:
    # The rate of the rank with the longest span was shown as that of the step: 4.7 % were printed
    # while another rank was idle for 40 %.
    timeline = simulate(TWO_RANKS, Costs(forward=[1, 3]))
    assert timeline.rank_spans == (13, 10)
    assert timeline.busy_seconds == (6, 10)
    assert timeline.rank_bubble_rates == (7 / 13, 3 / 13)
    assert timeline.bubble_rate == 5 / 13
    assert timeline.papers_bubble_rate == 7 / 13


def test_late_start_of_a_rank_counts_for_when_it_ends_and_not_for_its_span() -> None:
    schedule = build("ForwardOnly", ranks=3, microbatches=2)
    timeline = simulate(schedule, Costs(transfer=5))
    assert timeline.rank_spans == (2, 2, 2)
    assert timeline.end_time == 14
    assert simulate(lower(schedule), Costs(transfer=5)).rank_spans == (2, 7, 7)


def test_overlap_is_busy_once() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1B1
    """)
    assert simulate(schedule, Costs(overlap_gain=1)).busy_seconds == (5, 6)


def test_waiting_for_a_message_is_not_busy() -> None:
    timeline = simulate(lower(TWO_RANKS), Costs(transfer=4))
    assert timeline.busy_seconds == (6, 6)
    assert simulate(lower(TWO_RANKS), Costs(send=1)).busy_seconds == (8, 8)


def test_step_that_costs_nothing_has_no_bubble() -> None:
    timeline = simulate(TWO_RANKS, Costs(forward=0, backward_input=0, backward_weight=0))
    assert timeline.end_time == 0
    assert timeline.longest_span == 0
    assert timeline.period("nothing") == 0
    assert timeline.bubble_rate == 0
    assert timeline.rank_bubble_rates == (0, 0)


def test_activation_counts_from_its_forward_to_its_backward_or_weight_half() -> None:
    schedule = read_schedule("""
        0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2
        1F0 1B0 1F1 1B1 1F2 1B2
    """)
    timeline = simulate(schedule)
    assert timeline.rank_peak_activations == (3, 1)
    assert timeline.peak_activations == 3


@pytest.mark.parametrize("is_lowered", [False, True])
def test_lowering_changes_no_count_of_activations(is_lowered: bool) -> None:
    schedule = build("1F1B", ranks=4, microbatches=8)
    timeline = simulate(lower(schedule) if is_lowered else schedule)
    assert timeline.rank_peak_activations == (4, 3, 2, 1)


def test_spans_are_the_actions_of_a_rank_in_order() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1B1
    """)
    timeline = simulate(schedule, Costs(activation_bytes=2, overlap_gain=1))
    first, _, backward, _ = timeline.spans(0)
    action = schedule.rows.action
    assert first == Span(0, action(0), 0, 1, bytes=2, is_overlapped=False)
    assert backward == Span(0, action(2), 4, 6, bytes=2, is_overlapped=True)
    flags = [[span.is_overlapped for span in timeline.spans(rank)] for rank in (0, 1)]
    assert flags == [[False, True, True, False], [False] * 4]


def test_repr_is_one_line_however_long_the_timeline() -> None:
    timeline = simulate(build("1F1B", ranks=4, microbatches=100))
    assert repr(timeline) == (
        "<Timeline of 1F1B: 4 ranks, 800 actions, end time 309 s, bubble 2.9 %>"
    )
    assert repr(timeline.schedule) == (
        "<Schedule 1F1B: 4 ranks, 4 stages, 100 microbatches, 800 actions>"
    )
