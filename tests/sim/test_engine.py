"""The rules of the simulator, on schedules small enough to follow by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.planner.problem import SchedulingProblem
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.sim.explain import explain
from penstock.view.sources import timeline_of
from tests import strategies
from tests.tables import read_orders, read_schedule

TWO_RANKS = read_schedule("""
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
""")


def times_of(schedule: Schedule, costs: Costs | None = None) -> list[list[str]]:
    """Return when actions run, in the form of `read_orders`: 0F0@0-1 starts at 0, ends at 1."""
    timeline = simulate(schedule, costs)
    return [
        [f"{span.action}@{span.start:g}-{span.end:g}" for span in timeline.spans(rank)]
        for rank in range(schedule.num_ranks)
    ]


def test_action_starts_when_its_rank_is_free_and_its_inputs_are_there() -> None:
    expected = """
        0F0@0-1 0F1@1-2 0B0@4-6 0B1@7-9
        1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7
    """
    assert times_of(TWO_RANKS) == read_orders(expected)


def test_costs_are_per_stage_and_kind() -> None:
    schedule = read_schedule("""
        0F0 0I0 0W0
        1F0 1B0
    """)
    costs = Costs(
        forward=[1, 2], backward_input=[3, 9], backward_weight=[4, 9], full_backward=[9, 5]
    )
    expected = """
        0F0@0-1 0I0@8-11 0W0@11-15
        1F0@1-3 1B0@3-8
    """
    assert times_of(schedule, costs) == read_orders(expected)


def test_transfer_takes_the_time_of_its_own_link() -> None:
    # Row: sender, column: receiver. Down is slow, up is slower, and nobody uses the diagonal.
    costs = Costs(transfer=[[99, 10], [20, 99]])
    expected = """
        0F0@0-1 0F1@1-2 0B0@34-36 0B1@37-39
        1F0@11-12 1B0@12-14 1F1@14-15 1B1@15-17
    """
    assert times_of(TWO_RANKS, costs) == read_orders(expected)


def test_value_that_stays_on_its_rank_needs_no_transfer() -> None:
    schedule = read_schedule("0F0 1F0 1B0 0B0")
    costs = Costs(transfer=10).for_each_stage(2)
    expected = "0F0@0-1 1F0@1-2 1B0@2-4 0B0@4-6"
    assert times_of(schedule, costs) == read_orders(expected)


def test_send_keeps_the_sender_and_delays_the_receiver() -> None:
    # The end of an action is when its rank is free again, its sends included.
    expected = """
        0F0@0-1.5 0F1@1.5-3 0B0@5-7 0B1@8.5-10.5
        1F0@1.5-2.5 1B0@2.5-5 1F1@5-6 1B1@6-8.5
    """
    assert times_of(TWO_RANKS, Costs(send=0.5)) == read_orders(expected)


def test_lowered_send_is_an_action_of_its_own() -> None:
    expected = """
        0UNSHARD@0-0 0F0@0-1 0SEND_F0@1-1.5 0F1@1.5-2.5 0SEND_F1@2.5-3 0RECV_B0@3-7
        0B0@7-9 0RECV_B1@9-10.5 0B1@10.5-12.5 0REDUCE_GRAD@12.5-12.5 0RESHARD@12.5-12.5
    """
    times = times_of(lower(TWO_RANKS), Costs(send=0.5, transfer=1))
    assert times[0] == expected.split()


def test_overlap_takes_the_sum_of_its_parts_less_its_gain() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1B1
    """)
    without = """
        0F0@0-1 0F1@4-7 0B0@4-7 0B1@10-12
        1F0@1-2 1B0@2-4 1F1@7-8 1B1@8-10
    """
    assert times_of(schedule) == read_orders(without)
    halved = """
        0F0@0-1 0F1@4-6.5 0B0@4-6.5 0B1@9.5-11.5
        1F0@1-2 1B0@2-4 1F1@6.5-7.5 1B1@7.5-9.5
    """
    assert times_of(schedule, Costs(overlap_gain=0.5)) == read_orders(halved)
    hidden = """
        0F0@0-1 0F1@4-6 0B0@4-6 0B1@9-11
        1F0@1-2 1B0@2-4 1F1@6-7 1B1@7-9
    """
    assert times_of(schedule, Costs(overlap_gain=1)) == read_orders(hidden)


def test_transfer_of_a_lowered_schedule_starts_when_both_sides_are_there() -> None:
    schedule = read_schedule("""
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1F0 1RECV_F1 1F1
    """)
    # The second message is sent at 2, but its receive is posted only after the first forward.
    expected = """
        0F0@0-1 0SEND_F0@1-1 0F1@1-2 0SEND_F1@2-2
        1RECV_F0@0-4 1F0@4-5 1RECV_F1@5-8 1F1@8-9
    """
    assert times_of(schedule, Costs(transfer=3)) == read_orders(expected)


def test_join_waits_for_the_last_of_its_producers() -> None:
    schedule = read_schedule(
        """
        0F0
        1F0
        2F0
        """,
        Dataflow(3, [(0, 1), (1, 2), (0, 2)]),
    )
    costs = Costs(transfer=[[0, 1, 9], [0, 0, 1], [0, 0, 0]])
    assert times_of(schedule, costs) == [["0F0@0-1"], ["1F0@2-3"], ["2F0@10-11"]]


def test_schedule_that_never_finishes_is_refused() -> None:
    schedule = read_schedule("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """)
    with pytest.raises(DeadlockError) as caught:
        simulate(schedule)
    assert str(caught.value) == (
        "the schedule never finishes (ranks that wait for each other: 0, 1); "
        "penstock.check names the actions"
    )


def test_schedule_that_lacks_something_is_refused() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(read_schedule("0F0 0B0\n1F0"))
    assert str(caught.value) == (
        "rank 0, position 1, 0B0: what it waits for is not in the schedule; "
        "penstock.check says what is missing"
    )


@given(st.data())
def test_lowering_by_cost_changes_no_time_and_early_receives_win_none(data: st.DataObject) -> None:
    schedule = data.draw(strategies.schedules(max_ranks=5, max_microbatches=8))
    costs = data.draw(strategies.costs(schedule, least=0.0))
    implied = simulate(schedule, costs)
    by_cost = simulate(lower(schedule, receives=costs), costs)
    assert by_cost.rank_spans == implied.rank_spans
    assert by_cost.busy_seconds == implied.busy_seconds
    assert simulate(lower(schedule), costs).end_time >= implied.end_time


@given(st.data())
def test_cost_of_sending_is_the_same_implied_and_written_out_on_a_chain(
    data: st.DataObject,
) -> None:
    # Overlaps once paid for the sends of their first member only.
    schedule = data.draw(strategies.schedules(max_ranks=5, max_microbatches=8))
    drawn = data.draw(strategies.costs(schedule))
    costs = replace(drawn, send=data.draw(st.sampled_from((0.125, 0.5, 2.0))))
    implied = simulate(schedule, costs)
    by_cost = simulate(lower(schedule, receives=costs), costs)
    assert by_cost.rank_spans == implied.rank_spans
    assert by_cost.busy_seconds == implied.busy_seconds


def test_unit_costs_are_used_unless_others_are_given() -> None:
    schedule = build("ZBV", ranks=4, microbatches=8)
    assert simulate(schedule).end_time == simulate(schedule, Costs()).end_time == 25.5


def test_single_numbers_are_one_ranks_share_wherever_costs_are_used() -> None:
    # `simulate` and `show` once took them for each stage, and `compare` and `plan` for each rank:
    # the same model took 48 s in one place and 24 s in the other.
    schedule, costs = build("ZBV", ranks=4, microbatches=8), Costs(transfer=0.125, send=0.125)
    timeline = simulate(schedule, costs)
    per_stage = Costs(0.5, 0.5, 0.5, transfer=0.125, send=0.125).for_each_stage(8)
    assert simulate(schedule, per_stage).end.tolist() == timeline.end.tolist()
    assert compare([schedule], costs)["ZBV"].end.tolist() == timeline.end.tolist()
    assert timeline_of(schedule, costs=costs).end.tolist() == timeline.end.tolist()
    assert explain(schedule, costs).timeline.end.tolist() == timeline.end.tolist()
    problem = SchedulingProblem.of(costs, schedule.placement, 8)
    assert simulate(schedule, problem.costs).end.tolist() == timeline.end.tolist()
    by_cost = simulate(lower(schedule, receives=costs), costs)
    assert by_cost.rank_spans == timeline.rank_spans


def test_copies_of_a_part_cost_what_the_part_costs() -> None:
    schedule = build("DualPipe", ranks=4, microbatches=8)
    assert simulate(schedule, Costs(2, 3, 4)).busy_seconds == (72,) * 4
    assert simulate(schedule, Costs([2] * 8, [3] * 8, [4] * 8)).busy_seconds == (72,) * 4
