"""All checks together: which come first, how many problems are reported, what is raised."""

import pytest

from penstock.checks.problem import Problem
from penstock.checks.report import check, find_problems
from penstock.errors import DeadlockError, ScheduleError
from tests.tables import read_schedule


def test_problem_names_place_action_rule_and_neighbourhood() -> None:
    (problem,) = find_problems(read_schedule("0F0 0F0 0B0"))
    assert problem == Problem(
        rule="once",
        rank=0,
        action="0F0",
        message="appears 2 times",
        position=1,
        neighbourhood="  rank 0: 0F0 [0F0] 0B0",
    )
    assert str(Problem("once", 3, "3F0", "is missing")) == "rank 3, 3F0: is missing (rule: once)"


def test_check_raises_the_first_problem() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(read_schedule("0F1 0F2 0B1 0B2"))
    assert type(caught.value) is ScheduleError
    assert str(caught.value) == (
        "rank 0, 0F0: is missing; microbatches must be numbered from 0 (rule: once)"
    )


def test_check_says_nothing_about_a_schedule_that_is_fine() -> None:
    check(read_schedule("0F0 0B0\n1F0 1B0"))


def test_at_most_limit_problems_are_returned() -> None:
    schedule = read_schedule("0F0 " + " ".join(f"0B{microbatch}" for microbatch in range(40)))
    assert len(find_problems(schedule)) == 20
    assert len(find_problems(schedule, limit=3)) == 3
    assert len(find_problems(schedule, limit=100)) == 39


def test_what_relies_on_complete_schedules_is_not_asked_of_others() -> None:
    # Incomplete, without a receive, and stuck: only the first matters.
    schedule = read_schedule("0F0 0SEND_F0 0B0 0F1\n1B0 1F0 1F1")
    assert {problem.rule for problem in find_problems(schedule)} == {"once", "order"}


def test_deadlock_is_an_error_of_its_own() -> None:
    schedule = read_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError):
        check(schedule)
    with pytest.raises(ScheduleError):
        check(schedule)
    with pytest.raises(ValueError, match="deadlock"):
        check(schedule)
