"""All checks in order: later ones rely on what earlier ones have shown."""

from collections.abc import Iterator
from itertools import islice

from penstock.checks.complete import find_incomplete, find_misplaced
from penstock.checks.deadlock import Channels, find_deadlock
from penstock.checks.lowered import find_message_problems, find_stage_problems
from penstock.checks.problem import Problem
from penstock.checks.saved import find_memory_problems
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.schedule import Schedule, require_schedule

__all__ = ["check", "find_problems"]


def check(schedule: Schedule, *, channels: Channels = "directed") -> None:
    """Raise `ScheduleError` unless the schedule is complete and consistent and finishes.

    The message names rank, position, action and rule. `channels` is the model in which a lowered
    schedule must finish: one queue per direction of a pair of ranks, or one per pair ("shared").

    >>> check(Schedule.from_orders([["0F0", "0B0", "0B0"]]))
    Traceback (most recent call last):
    penstock.errors.ScheduleError: rank 0, position 2, 0B0: appears 2 times (rule: once)
      rank 0: 0F0 0B0 [0B0]
    """
    for problem in find_problems(schedule, channels=channels, limit=1):
        error = DeadlockError if problem.rule == "deadlock" else ScheduleError
        raise error(str(problem))


def find_problems(
    schedule: Schedule, *, channels: Channels = "directed", limit: int = 20
) -> tuple[Problem, ...]:
    """Return what is wrong with a schedule, at most `limit` problems; none if it may run.

    >>> find_problems(Schedule.from_orders([["0F0", "0B0"]]))
    ()
    """
    require_schedule(schedule)
    searches: tuple[Iterator[Problem], ...] = (
        find_misplaced(schedule),
        find_incomplete(schedule),
        find_memory_problems(schedule),
        find_message_problems(schedule),
        find_stage_problems(schedule),
        find_deadlock(schedule, channels),
    )
    for search in searches:
        # Each may rely on the ones before, so the first that finds something is the last to run.
        if problems := tuple(islice(search, limit)):
            return problems
    return ()
