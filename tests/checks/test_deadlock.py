"""Schedules that are complete, and yet never finish."""

import pytest

from penstock.checks.report import check, find_problems
from penstock.errors import DeadlockError, ScheduleError
from tests.tables import read_schedule


def test_ranks_that_wait_for_one_another_are_named_as_a_cycle() -> None:
    # Torch's validator accepts this one.
    schedule = read_schedule("""
        0F0 0B0 0F1 0B1
        1F0 1F1 1B0 1B1
    """)
    with pytest.raises(DeadlockError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "rank 0, position 1, 0B0: deadlock: these actions wait for each other (rule: deadlock)\n"
        "  rank 0, position 1, 0B0 waits for rank 1, position 2, 1B0\n"
        "  rank 1, position 1, 1F1 waits for rank 0, position 2, 0F1"
    )


def test_cycle_of_three_leaves_out_who_merely_waits_for_it() -> None:
    schedule = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B1 1F1 1B0
        2F0 2F1 2B0 2B1
        3F0 3F1 3B1 3B0
    """)
    problems = find_problems(schedule)
    assert list(map(str, problems)) == [
        "rank 1, position 1, 1B1: comes before its forward has ended (rule: order)\n"
        "  rank 1: 1F0 [1B1] 1F1 1B0"
    ]
    circle = read_schedule("""
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B1
        2F0 2F1 2B0 2B1
        3F0 3F1 3B0 3B1
    """)
    assert list(map(str, find_problems(circle))) == [
        "rank 1, position 1, 1B0: deadlock: these actions wait for each other (rule: deadlock)\n"
        "  rank 1, position 1, 1B0 waits for rank 2, position 2, 2B0\n"
        "  rank 2, position 1, 2F1 waits for rank 1, position 2, 1F1"
    ]


def test_send_after_what_depends_on_it_is_a_deadlock() -> None:
    schedule = read_schedule("""
        0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1
        1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """)
    assert list(map(str, find_problems(schedule))) == [
        "rank 0, position 4, 0B0: deadlock: these actions wait for each other (rule: deadlock)\n"
        "  rank 0, position 4, 0B0 waits for rank 1, position 5, 1SEND_B0\n"
        "  rank 1, position 3, 1F1 waits for rank 0, position 5, 0SEND_F1"
    ]


def test_two_ranks_that_send_before_they_post_their_receives_are_a_deadlock() -> None:
    # With buffered sends this would finish; NCCL and gloo do not promise any.
    schedule = read_schedule("""
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)
    assert list(map(str, find_problems(schedule))) == [
        "rank 0, position 3, 0SEND_F1: deadlock: these actions wait for each other "
        "(rule: deadlock)\n"
        "  rank 0, position 3, 0SEND_F1 waits for rank 1, position 4, 1RECV_F1\n"
        "  rank 1, position 3, 1SEND_B0 waits for rank 0, position 4, 0RECV_B0"
    ]


def test_messages_of_one_channel_must_be_listed_in_one_order() -> None:
    schedule = read_schedule("""
        0F0 0F1 0SEND_F1 0SEND_F0
        1RECV_F0 1RECV_F1 1F0 1F1
    """)
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "rank 0, position 2, 0SEND_F1: the other side of its channel is at 1RECV_F0 on rank "
        "1, position 0; "
        "both sides must list their messages in one order (rule: channel order)\n"
        "  rank 0: 0F0 0F1 [0SEND_F1] 0SEND_F0"
    )
    assert not isinstance(caught.value, DeadlockError)


def test_messages_that_cross_are_fine_with_a_queue_per_direction_only() -> None:
    schedule = read_schedule("""
        0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1
    """)
    assert find_problems(schedule, channels="directed") == ()
    assert list(map(str, find_problems(schedule, channels="shared"))) == [
        "rank 0, position 3, 0RECV_B0: the other side of its channel is at 1RECV_F1 on rank "
        "1, position 3; "
        "both sides must list their messages in one order (rule: channel order)\n"
        "  rank 0: 0F0 0SEND_F0 0F1 [0RECV_B0] 0SEND_F1 0B0 0RECV_B1"
    ]


def test_unknown_model_of_channels_is_refused() -> None:
    schedule = read_schedule("0F0 0SEND_F0\n1RECV_F0 1F0")
    with pytest.raises(ValueError, match="channels") as caught:
        find_problems(schedule, channels="buffered")  # type: ignore[arg-type]  # on purpose
    assert str(caught.value) == "channels must be 'directed' or 'shared' (got 'buffered')"
