"""Which rank is lost, by the status of every rank and when it was sent."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.alive.failure_detector import FailureDetector, Silence
from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus
from penstock.alive.stall import describe_stall
from penstock.alive.timeouts import Timeouts

TIMEOUTS = Timeouts(silence_seconds=30, stop_seconds=10, stall_seconds=100)
INSIDE = RankStatus(call=1, is_inside=True, done=3, doing="1F0 of step 0", seconds=1.0)


def make_detector(*statuses: RankStatus, now: float = 0.0) -> FailureDetector:
    detector = FailureDetector(len(statuses), TIMEOUTS, now)
    for rank, status in enumerate(statuses):
        detector.arrive(rank, 0, now)
        detector.update(rank, status, now)
    return detector


def test_ranks_that_answer_are_never_lost() -> None:
    detector = make_detector(INSIDE, INSIDE)
    for now in range(1000):
        detector.update(0, INSIDE, now)
        detector.update(1, INSIDE, now)
        assert detector.find_lost(now) is None


def test_rank_whose_connection_broke_has_ended() -> None:
    detector = make_detector(INSIDE, INSIDE)
    detector.end(1)
    last = "it was last seen in 1F0 of step 0"
    assert detector.find_lost(0) == LostRank(
        1, "ended (its connection broke)", last, may_be_done=True
    )


def test_rank_that_ended_after_it_had_failed_is_named_with_its_failure() -> None:
    # It may be gone before the others have left the meeting in which it reported the failure.
    detector = make_detector(INSIDE, replace(INSIDE, failure="ValueError: no"))
    detector.end(1)
    last = "it was last seen in 1F0 of step 0"
    what = "failed, and ended before all ranks knew: ValueError: no"
    assert detector.find_lost(0) == LostRank(1, what, last, may_be_done=True)


def test_neighbour_is_silent_after_its_timeout_and_not_before() -> None:
    silence = Silence(30)
    for rank, now in ((0, 0), (1, 0), (2, 0), (0, 20), (2, 20)):
        silence.hear(rank, now)
    assert list(silence.find(29.9)) == []
    assert list(silence.find(30)) == [1]
    assert silence.lasts(1, 30) == 30
    silence.forget(1)
    assert list(silence.find(30)) == []


def test_silence_does_not_count_while_the_listener_was_asleep() -> None:
    silence = Silence(30)
    silence.hear(1, 0)
    silence.restart(1000)
    assert list(silence.find(1029)) == []


def test_silent_rank_is_lost_unless_it_has_left() -> None:
    detector = make_detector(INSIDE, INSIDE, INSIDE)
    detector.leave(2, 1, "its pipeline was closed")
    detector.fall_silent(2)
    assert detector.find_lost(0) is None
    detector.fall_silent(1)
    last = "it was last seen in 1F0 of step 0"
    assert detector.find_lost(0) == LostRank(1, "has not answered for 30 s", last)


def test_rank_that_has_not_come_in_time_is_lost() -> None:
    detector = FailureDetector(3, TIMEOUTS, 0.0)
    for rank in (0, 2):
        detector.arrive(rank, 0, 0.0)
    assert not detector.is_complete
    assert detector.find_lost(299) is None
    what = "has not come to build its pipeline within 300 s"
    assert detector.find_lost(300) == LostRank(1, what, None)
    detector.arrive(1, 0, 300)
    assert detector.is_complete
    assert detector.find_lost(300) is None


def make_replicas(*statuses: RankStatus) -> FailureDetector:
    """Return a detector of two pipelines, each with half of the ranks."""
    detector = FailureDetector(len(statuses), TIMEOUTS, 0.0)
    for rank, status in enumerate(statuses):
        detector.arrive(rank, 2 * rank // len(statuses), 0.0)
        detector.update(rank, status, 0.0)
    return detector


REDUCING = replace(INSIDE, call=5, doing="0REDUCE_GRAD of step 4", is_with_replicas=True)


def test_replicas_may_make_different_numbers_of_calls() -> None:
    detector = make_replicas(replace(INSIDE, call=9), INSIDE)
    detector.leave(1, 2, "its pipeline was closed")
    assert detector.find_lost(1000) is None


def test_rank_that_left_is_lost_for_a_replica_that_waits_for_it() -> None:
    detector = make_replicas(REDUCING, replace(INSIDE, is_inside=False))
    detector.leave(1, 9, "its pipeline was closed")
    assert detector.find_lost(9) is None
    lost = detector.find_lost(10)
    assert lost is not None
    assert (lost.rank, lost.what) == (1, "has left (its pipeline was closed)")


def test_rank_that_left_in_the_middle_of_a_call_is_lost_for_replicas_at_once() -> None:
    detector = make_replicas(REDUCING, INSIDE)
    detector.leave(1, 0, "SystemExit in the middle of a step")
    lost = detector.find_lost(0)
    assert lost is not None
    assert (lost.rank, lost.what) == (1, "has left (SystemExit in the middle of a step)")


def test_rank_that_failed_is_blamed_for_a_replica_that_waits_for_it() -> None:
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    detector = make_replicas(REDUCING, failed)
    assert detector.find_lost(9) is None
    what = "failed, and rank 0 did not leave 0REDUCE_GRAD of step 4 within 10 s: ValueError: no"
    assert detector.find_lost(10) == LostRank(1, what, None)


# The collective broke when the process of the other replica ended, well after its error and its
# goodbye: ranks raised what gloo says of that, and nobody was named.
def test_replica_that_failed_and_left_is_blamed_for_a_collective_that_broke() -> None:
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    detector = make_replicas(replace(REDUCING, failure="RuntimeError: closed"), failed)
    detector.leave(1, 9, "its pipeline was closed")
    lost = detector.find_lost(0)
    assert lost is not None
    what = "failed, and has left (its pipeline was closed): ValueError: no"
    assert (lost.rank, lost.what) == (1, what)


def test_replica_that_left_well_is_not_blamed_for_an_error_of_another() -> None:
    detector = make_replicas(replace(REDUCING, failure="ValueError: no"), INSIDE)
    detector.leave(1, 9, "its pipeline was closed")
    assert detector.find_lost(9) is None


def test_broken_connection_is_blamed_on_a_replica_that_failed_and_left() -> None:
    # All processes save together; each rank that waited for the one that failed blamed itself.
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    detector = make_replicas(replace(INSIDE, call=7, broken="closed"), failed)
    detector.leave(1, 1, "its pipeline was closed")
    lost = detector.find_lost(1)
    assert lost is not None
    assert (lost.rank, lost.what) == (
        1,
        "failed, and ended before all ranks knew: ValueError: no",
    )


def test_rank_that_said_goodbye_is_lost_once_another_rank_continues() -> None:
    detector = make_detector(INSIDE, INSIDE)
    detector.leave(1, 1, "its pipeline was closed")
    detector.end(1)
    detector.update(0, INSIDE, 40)
    assert detector.find_lost(40) is None
    detector.update(0, replace(INSIDE, call=2), 41)
    last = "it was last seen in 1F0 of step 0"
    what = "has left (its pipeline was closed)"
    assert detector.find_lost(41) == LostRank(1, what, last, may_be_done=True)


def test_broken_connection_is_blamed_on_a_dead_process_if_there_is_one() -> None:
    detector = make_detector(INSIDE, replace(INSIDE, broken="reset"), INSIDE)
    assert detector.find_lost(0.9) is None
    last = "it was last seen in 1F0 of step 0"
    what = "lost its connection to another rank (reset)"
    assert detector.find_lost(1) == LostRank(1, what, last)
    detector.end(2)
    lost = detector.find_lost(1)
    assert lost is not None
    assert lost.rank == 2


def test_broken_connection_is_blamed_on_a_rank_that_failed_and_left() -> None:
    # A rank that raised while it clipped ended well before the others gave it up, and those
    # blamed themselves for the connection that it closed.
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    detector = make_detector(replace(INSIDE, broken="closed"), failed)
    detector.leave(1, 1, "its pipeline was closed")
    what = "failed, and ended before all ranks knew: ValueError: no"
    last = "it was last seen in 1F0 of step 0"
    assert detector.find_lost(1) == LostRank(1, what, last, may_be_done=True)


def test_failed_rank_is_blamed_for_a_step_that_does_not_end_and_the_stuck_one_is_named() -> None:
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    waiting = replace(INSIDE, waits_for=3)
    detector = make_detector(failed, waiting, waiting, INSIDE)
    assert detector.find_lost(9.9) is None
    what = "failed, and rank 3 did not leave 1F0 of step 0 within 10 s: ValueError: no"
    assert detector.find_lost(10) == LostRank(0, what, None)


def test_failed_step_may_continue_while_it_makes_progress() -> None:
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    detector = make_detector(failed, INSIDE)
    for second in range(1, 100):
        detector.update(0, failed, second)
        detector.update(1, replace(INSIDE, done=second // 9), second)
        assert detector.find_lost(second) is None


def test_rank_is_not_lost_when_all_ranks_have_failed() -> None:
    failed = replace(INSIDE, is_inside=False, failure="BatchError: no")
    detector = make_detector(failed, failed)
    assert detector.find_lost(20) is None


def test_stall_is_reported_after_its_timeout_and_again_after_twice_as_long() -> None:
    detector = make_detector(INSIDE, INSIDE)
    reported = [now for now in range(1000) if detector.find_stall(now) is not None]
    assert reported == [100, 200, 400, 800]


def test_progress_restarts_the_time_until_a_stall_is_reported() -> None:
    detector = make_detector(INSIDE, INSIDE)
    assert detector.find_stall(150) is not None
    detector.update(0, replace(INSIDE, done=4), 160)
    assert detector.find_stall(259) is None
    assert detector.find_stall(260) is not None


def test_ranks_between_steps_do_not_stall() -> None:
    detector = make_detector(replace(INSIDE, is_inside=False), replace(INSIDE, is_inside=False))
    assert detector.find_stall(10_000) is None


def test_stall_report_shows_every_rank_and_names_the_one_that_all_wait_for() -> None:
    statuses = [
        RankStatus(1, True, 3, "0B0 (backward) of step 4", 121.2, waits_for=1, awaited="0RECV_B0"),
        RankStatus(1, True, 3, "1F1 (forward) of step 4", 124.9),
        RankStatus(1, True, 3, "the meeting after the step of step 4", 3.0, is_meeting=True),
        RankStatus(0, False),
    ]
    assert describe_stall(statuses[:3], 120.4) == (
        "no progress for 120 s; all ranks are waiting for rank 1\n"
        "rank  in                                    for    waits for\n"
        "0     0B0 (backward) of step 4              121 s  rank 1, 0RECV_B0\n"
        "1     1F1 (forward) of step 4               125 s\n"
        "2     the meeting after the step of step 4  3 s    all ranks"
    )
    assert describe_stall(statuses, 120.4).splitlines()[0] == (
        "no progress for 120 s; ranks 1, 3 are not waiting for another"
    )
    assert describe_stall(statuses[:1], 120.4).splitlines()[0] == (
        "no progress for 120 s; every rank is waiting for another"
    )


TEXTS = st.none() | st.text(max_size=20)
STATUSES = st.builds(
    RankStatus,
    call=st.integers(0, 5),
    is_inside=st.booleans(),
    done=st.integers(0, 5),
    doing=TEXTS,
    waits_for=st.none() | st.integers(0, 2),
    failure=TEXTS,
    broken=TEXTS,
)


@given(st.lists(st.tuples(st.integers(0, 2), STATUSES, st.floats(0, 50)), max_size=20))
def test_detector_names_a_rank_or_none_whatever_statuses_it_gets(
    beats: list[tuple[int, RankStatus, float]],
) -> None:
    detector = FailureDetector(3, TIMEOUTS, 0.0)
    now = 0.0
    for rank, status, seconds in beats:
        now += seconds
        detector.update(rank, RankStatus.from_values(status.to_values()), now)
        lost = detector.find_lost(now)
        assert lost is None or lost.rank in range(3)
        detector.find_stall(now)
