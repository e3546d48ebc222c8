"""The fixed families that exist for a problem, which a solved schedule must beat."""

from collections.abc import Iterator

from penstock.errors import SizeError
from penstock.ir.schedule import Schedule
from penstock.planner.problem import SchedulingProblem
from penstock.schedules.registry import FAMILIES, Family

__all__ = ["fixed_schedules"]


def fixed_schedules(problem: SchedulingProblem) -> Iterator[Schedule]:
    """Yield the schedules of families with the problem's placement, whatever bytes they need.

    Families that give the same order at these sizes are listed once.

    >>> from penstock.costs import Costs
    >>> from penstock.ir.placement import Placement
    >>> problem = SchedulingProblem.of(Costs(), Placement.v(4), 8)
    >>> [schedule.name for schedule in fixed_schedules(problem)]
    ['ZBV', 'V-Half', 'V-Min', 'DualPipeV']
    """
    known: set[Schedule] = set()
    for family in FAMILIES.values():
        schedule = _generate(family, problem)
        if schedule is not None and _solves(schedule, problem) and schedule not in known:
            known.add(schedule)
            yield schedule


def _generate(family: Family, problem: SchedulingProblem) -> Schedule | None:
    """Return the family's schedule, or None if it has none for these sizes."""
    per_rank, rest = divmod(problem.stages, problem.ranks)
    if rest or family.copies > 1:
        return None
    try:
        return family.generate(problem.ranks, problem.microbatches, per_rank)
    except SizeError:
        return None


def _solves(schedule: Schedule, problem: SchedulingProblem) -> bool:
    is_same = schedule.placement == problem.placement and schedule.dataflow.is_chain
    return is_same and not schedule.is_forward_only
