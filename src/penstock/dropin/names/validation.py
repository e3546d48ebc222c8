"""Is an order complete and sure to finish, and which rank holds which stage?"""

from collections.abc import Iterator

from penstock.checks.complete import find_incomplete, find_misplaced
from penstock.checks.deadlock import find_deadlock
from penstock.checks.lowered import find_message_problems
from penstock.checks.problem import Problem
from penstock.dropin.names.actions import _Action
from penstock.dropin.names.lists import AnyOrder, OrderError, make_schedule, read_stage_ranks
from penstock.errors import DeadlockError, ScheduleError
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate

__all__ = ["_validate_schedule"]


def _validate_schedule(
    actions: AnyOrder, pp_group_size: int, num_stages: int, num_microbatches: int
) -> dict[int, int]:
    """Check that an order is complete and finishes, and return the rank of every stage."""
    _check_ranks(actions, pp_group_size)
    holder, stages = read_stage_ranks(actions), range(num_stages)
    if list(holder) != list(stages):
        missing, surplus = set(stages) - set(holder), set(holder) - set(stages)
        raise OrderError(
            f"the order names other stages than the {num_stages} that there are "
            f"(missing: {sorted(missing)}, unknown: {sorted(surplus)})"
        )
    try:
        schedule = make_schedule(actions, holder, num_microbatches)
    except ScheduleError as error:
        raise OrderError(str(error)) from error
    if schedule.is_forward_only:
        raise OrderError("no rank runs a backward; add B, or I and W, for every forward")
    for problem in _find_problems(schedule):
        note = "\n  (positions leave out idle slots)" if None in actions[problem.rank] else ""
        raise OrderError(f"{problem}{note}")
    return holder


def _check_ranks(actions: AnyOrder, num_ranks: int) -> None:
    if sorted(actions) != list(range(num_ranks)):
        raise OrderError(
            f"one list for each of {num_ranks} ranks, numbered from 0 (got {sorted(actions)})"
        )
    for rank in actions:
        if not any(actions[rank]):
            raise OrderError(f"rank {rank} runs nothing; give every rank a stage")
        for position, action in enumerate(actions[rank]):
            if action is not None and not isinstance(action, _Action):
                raise OrderError(f"rank {rank}, position {position}: {action!r} is not an action")


def _find_problems(schedule: Schedule) -> Iterator[Problem]:
    """Yield what is wrong; each search relies on those before, so stop at the first problem."""
    yield from find_misplaced(schedule)
    yield from find_incomplete(schedule)
    yield from find_message_problems(schedule)
    for problem in find_deadlock(schedule):
        if problem.rule != "deadlock":
            yield problem
            continue
        try:
            # The search lets sends wait for their receives; torch's do not.
            simulate(schedule)
        except DeadlockError:
            yield problem
