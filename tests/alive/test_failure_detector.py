"""Who is lost, by what every rank has told and when."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.alive.failure_detector import FailureDetector, describe_stall
from penstock.alive.lost_rank import LostRank
from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts

WATCH = Timeouts(silence_seconds=30, stop_seconds=10, stall_seconds=100)
INSIDE = RankStatus(call=1, is_inside=True, done=3, doing="1F0 of step 0", seconds=1.0)


def make_judge(*places: RankStatus, now: float = 0.0) -> FailureDetector:
    judge = FailureDetector(len(places), WATCH, now)
    for rank, place in enumerate(places):
        judge.hear(rank, place, now)
    return judge


def test_nobody_is_lost_who_answers() -> None:
    judge = make_judge(INSIDE, INSIDE)
    for now in range(1000):
        judge.hear(0, INSIDE, now)
        judge.hear(1, INSIDE, now)
        assert judge.find_lost(now) is None


def test_rank_whose_connection_broke_has_ended() -> None:
    judge = make_judge(INSIDE, INSIDE)
    judge.end(1)
    last = "it was last heard of in 1F0 of step 0"
    assert judge.find_lost(0) == LostRank(1, "ended (its connection broke)", last, is_quiet=True)


def test_rank_that_ended_after_it_had_failed_is_named_with_its_failure() -> None:
    # It may be gone before the others are out of the meeting in which it told them.
    judge = make_judge(INSIDE, replace(INSIDE, failure="ValueError: no"))
    judge.end(1)
    last = "it was last heard of in 1F0 of step 0"
    what = "failed, and ended before all others knew: ValueError: no"
    assert judge.find_lost(0) == LostRank(1, what, last, is_quiet=True)


def test_silent_rank_is_lost_when_its_time_is_over_and_not_before() -> None:
    judge = make_judge(INSIDE, INSIDE, INSIDE)
    for rank in (0, 2):
        judge.hear(rank, INSIDE, 20)
    assert judge.find_lost(29.9) is None
    last = "it was last heard of in 1F0 of step 0"
    assert judge.find_lost(30) == LostRank(1, "has stopped answering (for 30 s)", last)


def test_silence_does_not_count_while_the_judge_slept() -> None:
    judge = make_judge(INSIDE, INSIDE)
    judge.forgive(1000)
    assert judge.find_lost(1000) is None
    assert judge.find_lost(1029) is None


def test_goodbye_is_no_loss_until_somebody_goes_on() -> None:
    judge = make_judge(INSIDE, INSIDE)
    judge.leave(1, 1, "its pipeline was closed")
    judge.end(1)
    judge.hear(0, INSIDE, 40)
    assert judge.find_lost(40) is None
    judge.hear(0, replace(INSIDE, call=2), 41)
    last = "it was last heard of in 1F0 of step 0"
    what = "has left (its pipeline was closed)"
    assert judge.find_lost(41) == LostRank(1, what, last, is_quiet=True)


def test_broken_connection_is_blamed_on_a_dead_process_if_there_is_one() -> None:
    judge = make_judge(INSIDE, replace(INSIDE, broken="reset"), INSIDE)
    assert judge.find_lost(0.9) is None
    last = "it was last heard of in 1F0 of step 0"
    what = "lost its connection to another rank (reset)"
    assert judge.find_lost(1) == LostRank(1, what, last)
    judge.end(2)
    lost = judge.find_lost(1)
    assert lost is not None
    assert lost.rank == 2


def test_failed_rank_is_blamed_for_a_step_that_does_not_end_and_the_stuck_one_is_named() -> None:
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    waiting = replace(INSIDE, waits_for=3)
    judge = make_judge(failed, waiting, waiting, INSIDE)
    assert judge.find_lost(9.9) is None
    what = "failed, and rank 3 did not come out of 1F0 of step 0 for 10 s: ValueError: no"
    assert judge.find_lost(10) == LostRank(0, what, None)


def test_failed_step_may_go_on_as_long_as_it_gets_on() -> None:
    failed = replace(INSIDE, is_inside=False, failure="ValueError: no")
    judge = make_judge(failed, INSIDE)
    for second in range(1, 100):
        judge.hear(0, failed, second)
        judge.hear(1, replace(INSIDE, done=second // 9), second)
        assert judge.find_lost(second) is None


def test_failure_on_all_ranks_is_nobodys_loss() -> None:
    failed = replace(INSIDE, is_inside=False, failure="BatchError: no")
    judge = make_judge(failed, failed)
    assert judge.find_lost(20) is None


def test_stall_is_reported_after_its_time_and_again_after_twice_as_long() -> None:
    judge = make_judge(INSIDE, INSIDE)
    reported = [now for now in range(1000) if judge.find_stall(now) is not None]
    assert reported == [100, 200, 400, 800]


def test_stall_that_ended_is_reported_anew_the_next_time() -> None:
    judge = make_judge(INSIDE, INSIDE)
    assert judge.find_stall(150) is not None
    judge.hear(0, replace(INSIDE, done=4), 160)
    assert judge.find_stall(259) is None
    assert judge.find_stall(260) is not None


def test_nothing_stalls_between_steps() -> None:
    judge = make_judge(replace(INSIDE, is_inside=False), replace(INSIDE, is_inside=False))
    assert judge.find_stall(10_000) is None


def test_stall_report_shows_every_rank_and_names_the_one_that_waits_for_nobody() -> None:
    places = [
        RankStatus(1, True, 3, "0B0 (backward) of step 4", 121.2, waits_for=1, awaited="0RECV_B0"),
        RankStatus(1, True, 3, "1F1 (forward) of step 4", 124.9),
        RankStatus(1, True, 3, "the meeting after the step of step 4", 3.0, is_meeting=True),
        RankStatus(0, False),
    ]
    assert describe_stall(places[:3], 120.4) == (
        "no rank has got on for 120 s; all others wait for rank 1 in the end\n"
        "rank  in                                    since  waits for\n"
        "0     0B0 (backward) of step 4              121 s  rank 1, 0RECV_B0\n"
        "1     1F1 (forward) of step 4               125 s\n"
        "2     the meeting after the step of step 4  3 s    all ranks"
    )
    assert describe_stall(places, 120.4).splitlines()[0] == (
        "no rank has got on for 120 s; the ranks 1, 3 wait for no other"
    )
    assert describe_stall(places[:1], 120.4).splitlines()[0] == (
        "no rank has got on for 120 s; every rank waits for another"
    )


TEXTS = st.none() | st.text(max_size=20)
PLACES = st.builds(
    RankStatus,
    call=st.integers(0, 5),
    is_inside=st.booleans(),
    done=st.integers(0, 5),
    doing=TEXTS,
    waits_for=st.none() | st.integers(0, 2),
    failure=TEXTS,
    broken=TEXTS,
)


@given(st.lists(st.tuples(st.integers(0, 2), PLACES, st.floats(0, 50)), max_size=20))
def test_whatever_is_told_the_judge_names_a_rank_or_nobody(
    news: list[tuple[int, RankStatus, float]],
) -> None:
    judge = FailureDetector(3, WATCH, 0.0)
    now = 0.0
    for rank, place, seconds in news:
        now += seconds
        judge.hear(rank, RankStatus.from_values(place.to_values()), now)
        lost = judge.find_lost(now)
        assert lost is None or lost.rank in range(3)
        judge.find_stall(now)
