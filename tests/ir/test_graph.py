"""Who waits for whom, as small tables: what waits, then what it needs and over which link."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir.dataflow import Dataflow
from penstock.ir.graph import build_graph
from penstock.ir.schedule import Schedule
from tests.tables import read_schedule


def needs_of(schedule: Schedule) -> list[str]:
    """Return a line per action that waits, such as "1F0  0F0 over 0>1"."""
    graph, rows, ranks = build_graph(schedule), schedule.rows, schedule.num_ranks
    lines = []
    for row in range(len(rows)):
        needs = []
        for slot in range(graph.first[row], graph.first[row + 1]):
            link = int(graph.link[slot])
            way = f" over {link // ranks}>{link % ranks}" if link >= 0 else ""
            needs.append(f"{rows.action(int(graph.need[slot]))}{way}")
        if needs:
            lines.append(f"{rows.action(row)}  {', '.join(sorted(needs))}")
    return lines


def test_chain_waits_forwards_down_and_backwards_up() -> None:
    schedule = read_schedule("""
        0F0 0B0
        1F0 1I0 1W0
    """)
    assert needs_of(schedule) == [
        "0B0  0F0, 1I0 over 1>0",
        "1F0  0F0 over 0>1",
        "1I0  1F0",
        "1W0  1I0",
    ]


def test_microbatches_do_not_wait_for_one_another() -> None:
    schedule = read_schedule("0F0 0F1 0B1 0B0")
    assert needs_of(schedule) == ["0B1  0F1", "0B0  0F0"]


def test_stages_of_one_rank_need_no_link() -> None:
    schedule = read_schedule("""
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
    """)
    assert needs_of(schedule) == [
        "3F0  2F0 over 1>0",
        "3B0  3F0",
        "0B0  0F0, 1B0 over 1>0",
        "1F0  0F0 over 0>1",
        "2F0  1F0",
        "2B0  2F0, 3B0 over 0>1",
        "1B0  1F0, 2B0",
    ]


def test_skip_makes_the_join_wait_for_both_and_the_fork_for_both_gradients() -> None:
    schedule = read_schedule(
        """
        0F0 0B0
        1F0 1B0
        2F0 2B0
        """,
        Dataflow(3, [(0, 1), (1, 2), (0, 2)]),
    )
    assert needs_of(schedule) == [
        "0B0  0F0, 1B0 over 1>0, 2B0 over 2>0",
        "1F0  0F0 over 0>1",
        "1B0  1F0, 2B0 over 2>1",
        "2F0  0F0 over 0>2, 1F0 over 1>2",
        "2B0  2F0",
    ]


def test_copies_of_the_model_do_not_wait_for_one_another() -> None:
    schedule = read_schedule(
        """
        0F0 3F1
        2F1 1F0
        """,
        Dataflow.copies(2, 2),
    )
    assert needs_of(schedule) == ["3F1  2F1 over 1>0", "1F0  0F0 over 0>1"]


def test_lowered_work_waits_for_the_receive_and_for_the_send() -> None:
    schedule = read_schedule("""
        0UNSHARD 0F0 0SEND_F0 0RECV_B0 0I0 0W0 0REDUCE_GRAD 0RESHARD
        1RECV_F0 1F0 1B0 1SEND_B0
    """)
    assert needs_of(schedule) == [
        "0SEND_F0  0F0",
        "0I0  0F0, 0RECV_B0 over 1>0, 1SEND_B0 over 1>0",
        "0W0  0I0",
        "1F0  0SEND_F0 over 0>1, 1RECV_F0 over 0>1",
        "1B0  1F0",
        "1SEND_B0  1B0",
    ]


def test_lowered_skip_waits_for_the_message_of_its_own_edge() -> None:
    schedule = read_schedule(
        """
        0F0 0SEND_F0 0SEND_F0>2
        1RECV_F0 1F0 1SEND_F0
        2RECV_F0>0 2RECV_F0 2F0
        """,
        Dataflow(3, [(0, 1), (1, 2), (0, 2)]),
    )
    assert needs_of(schedule) == [
        "0SEND_F0  0F0",
        "0SEND_F0>2  0F0",
        "1F0  0SEND_F0 over 0>1, 1RECV_F0 over 0>1",
        "1SEND_F0  1F0",
        "2F0  0SEND_F0>2 over 0>2, 1SEND_F0 over 1>2, 2RECV_F0 over 1>2, 2RECV_F0>0 over 0>2",
    ]


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (
            "0F0 0B0\n1F0",
            "rank 0, position 1, 0B0: what it waits for is not in the schedule; "
            "penstock.check says what is missing",
        ),
        (
            "0F0 0SEND_F0\n1F0",
            "rank 1, position 0, 1F0: what it waits for is not in the schedule; "
            "penstock.check says what is missing",
        ),
        (
            "0F0 0W0",
            "rank 0, position 1, 0W0: what it waits for is not in the schedule; "
            "penstock.check says what is missing",
        ),
    ],
)
def test_missing_need_is_an_error_that_names_who_waits(picture: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build_graph(read_schedule(picture))
    assert str(caught.value) == message


def test_action_for_an_unknown_microbatch_is_refused() -> None:
    orders = [["0F0", "0SEND_F7", "0B0"], ["1RECV_F0", "1F0", "1B0"]]
    with pytest.raises(ScheduleError) as caught:
        build_graph(Schedule.from_orders(orders))
    assert str(caught.value) == (
        "an action names a stage or microbatch that does not exist; penstock.check says which"
    )
