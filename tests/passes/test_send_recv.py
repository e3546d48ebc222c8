"""Sends and receives: where they stand, how many there are, and that the result finishes."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.checks.report import find_problems
from penstock.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.actions import Action, Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.schedule import Schedule
from penstock.passes.send_recv import add_send_recv, add_send_recv_by_cost, delay_receives
from penstock.sim.engine import simulate
from tests import strategies
from tests.tables import orders_of, read_orders, read_schedule

Pass = Callable[[Schedule], Schedule]

PASSES: dict[str, Pass] = {
    "early": add_send_recv,
    "late": lambda schedule: delay_receives(add_send_recv(schedule)),
    "by cost": lambda schedule: add_send_recv_by_cost(schedule, Costs(transfer=0.5)),
}


def test_receive_goes_where_its_rank_is_when_the_send_is_reached() -> None:
    schedule = read_schedule("""
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """)
    expected = """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0B0 0RECV_B1 0B1 0RECV_B2 0B2
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2
    """
    assert orders_of(add_send_recv(schedule)) == read_orders(expected)


def test_late_receive_goes_right_before_its_use_but_not_past_a_send() -> None:
    schedule = read_schedule("""
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """)
    expected = """
        0F0 0SEND_F0 0F1 0SEND_F1 0F2 0RECV_B0 0SEND_F2 0B0 0RECV_B1 0B1 0RECV_B2 0B2
        1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2
    """
    assert orders_of(delay_receives(add_send_recv(schedule))) == read_orders(expected)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (
            Costs(),
            """
            0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
            1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
            """,
        ),
        # Rank 1 is still at its first forward when both messages have been sent.
        (
            Costs(forward=[1, 4]),
            """
            0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
            1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
            """,
        ),
        # The first backward is sent while rank 0 is still busy with its second forward.
        (
            Costs(forward=[9, 1]),
            """
            0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1
            1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
            """,
        ),
    ],
)
def test_receive_by_cost_goes_before_the_work_during_which_its_send_happens(
    costs: Costs, expected: str
) -> None:
    schedule = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
    """)
    assert orders_of(add_send_recv_by_cost(schedule, costs)) == read_orders(expected)


def test_stages_on_one_rank_need_no_message() -> None:
    schedule = read_schedule("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)
    expected = """
        0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0
        1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0
    """
    assert orders_of(add_send_recv(schedule)) == read_orders(expected)
    single = read_schedule("0F0 1F0 1B0 0B0")
    assert add_send_recv(single) == single


def test_skip_is_sent_to_each_of_its_consumers() -> None:
    schedule = read_schedule(
        """
        0F0 0B0
        1F0 1B0
        2F0 2B0
        """,
        Dataflow(3, [(0, 1), (1, 2), (0, 2)]),
    )
    expected = """
        0F0 0SEND_F0 0SEND_F0>2 0RECV_B0>2 0RECV_B0 0B0
        1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0
        2RECV_F0>0 2RECV_F0 2F0 2B0 2SEND_B0>0 2SEND_B0
    """
    assert orders_of(add_send_recv(schedule)) == read_orders(expected)


def test_sends_of_an_overlap_follow_it_and_its_receives_come_before() -> None:
    schedule = read_schedule("""
        0F0 (0F1;0B0)OVERLAP_F_B 0B1
        1F0 1B0 1F1 1B1
    """)
    expected = """
        0F0 0SEND_F0 0RECV_B0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """
    assert orders_of(add_send_recv(schedule)) == read_orders(expected)


@pytest.mark.parametrize("name", ["early", "by cost"])
def test_schedule_with_messages_is_not_given_more(name: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        PASSES[name](lower(build("1F1B", ranks=2, microbatches=2)))
    message = "the schedule already has sends and receives; lower it only once"
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["early", "by cost"])
def test_order_that_never_finishes_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        PASSES[name](read_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    message = "the order never finishes, so no message can be placed; check it first"
    assert str(caught.value) == message


def messages_of(schedule: Schedule) -> Counter[str]:
    """Count the sends and receives that a lowered schedule must have by its dataflow."""
    holder, flow = schedule.placement.rank_of_stage, schedule.dataflow
    made = {
        (action.kind is Kind.FORWARD, action.stage, action.microbatch)
        for action in map(schedule.rows.action, range(len(schedule.rows)))
        if action.kind is not Kind.BACKWARD_WEIGHT
    }
    expected: Counter[str] = Counter()
    for is_forward, stage, microbatch in made:
        peers = flow.consumers(stage) if is_forward else flow.producers(stage)
        send, receive = (Kind.SEND_F, Kind.RECV_F) if is_forward else (Kind.SEND_B, Kind.RECV_B)
        for peer in peers:
            if holder[peer] != holder[stage]:
                expected[str(Action(send, stage, microbatch, peer))] += 1
                expected[str(Action(receive, peer, microbatch, stage))] += 1
    return expected


ANY_SCHEDULE = strategies.schedules() | strategies.dag_schedules()


@pytest.mark.parametrize("name", PASSES)
@given(schedule=ANY_SCHEDULE)
def test_one_message_per_edge_between_ranks_and_the_same_order_of_compute(
    name: str, schedule: Schedule
) -> None:
    lowered = PASSES[name](schedule)
    talks = [
        str(action)
        for action in map(lowered.rows.action, range(len(lowered.rows)))
        if action.kind.is_communication
    ]
    assert Counter(talks) == messages_of(schedule)
    computes = lowered.rows.keep(lowered.rows.is_compute)
    assert [list(computes.works(rank)) for rank in range(schedule.num_ranks)] == [
        list(order) for order in schedule.orders
    ]


@pytest.mark.parametrize("name", PASSES)
@given(schedule=ANY_SCHEDULE)
def test_result_finishes_even_where_both_directions_share_a_queue(
    name: str, schedule: Schedule
) -> None:
    lowered = PASSES[name](schedule)
    assert find_problems(lowered, channels="shared") == ()
    assert find_problems(lowered, channels="directed") == ()


@given(st.data())
def test_receives_by_cost_cost_nothing_and_early_ones_no_more_than_late_ones(
    data: st.DataObject,
) -> None:
    schedule = data.draw(ANY_SCHEDULE)
    costs = data.draw(strategies.costs(schedule, least=0.0))
    implied = simulate(schedule, costs)
    early = simulate(add_send_recv(schedule), costs)
    late = simulate(delay_receives(add_send_recv(schedule)), costs)
    by_cost = simulate(add_send_recv_by_cost(schedule, costs), costs)
    assert by_cost.rank_spans == implied.rank_spans
    assert implied.end_time <= early.end_time <= late.end_time


def test_delaying_is_only_safe_where_messages_come_in_one_order() -> None:
    # Rank 2 lists its messages against the order in which they can be sent. That finishes only
    # because both receives stand before the work; the docstring promises no more.
    schedule = read_schedule(
        """
        0F0 0SEND_F0>3 0SEND_F0
        1RECV_F0 1F0 1SEND_F0
        2RECV_F0 3RECV_F0>0 2F0 3F0
        """,
        Dataflow(4, [(0, 1), (1, 2), (0, 3), (2, 3)]),
    )
    assert find_problems(schedule) == ()
    assert [problem.rule for problem in find_problems(delay_receives(schedule))] == ["deadlock"]
