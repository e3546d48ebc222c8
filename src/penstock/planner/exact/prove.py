"""The optimal schedule, with a proof, for small problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import le
from typing import TYPE_CHECKING, TypeAlias

from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.exact.byte_limits import add_bytes
from penstock.planner.exact.constraint_solver import (
    kept_interrupt,
    load_library,
    make_solver,
)
from penstock.planner.exact.hints import add_hints, read_schedule
from penstock.planner.exact.model import ScheduleModel, add_order, make_model
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolverSolutionCallback

__all__ = ["Exact", "prove"]

# Takes the seconds of the best step and the bound so far.
Progress: TypeAlias = Callable[[float, float], None]

# A schedule is taken for optimal if it is above the bound by no more than this part of it: the
# proof is made in whole ticks, which are so fine that their rounding makes up less than that.
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Exact:
    """The best schedule that was found, and seconds that no schedule can beat."""

    schedule: Schedule
    seconds: float
    lower_bound: float

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule is faster, to a millionth."""
        return self.seconds <= self.lower_bound * (1 + _TOLERANCE)


def prove(
    problem: SchedulingProblem,
    *,
    start: Schedule | None = None,
    seconds: float = 10.0,
    work: float | None = None,
    progress: Progress | None = None,
) -> Exact:
    """Search for the best schedule of a problem, and for a proof that none is better.

    `start` is a schedule that is known already: the search begins there, and the answer is never
    worse. Without it, the search begins with microbatches that go one at a time. `progress` is
    called with the seconds and the bound whenever a better schedule is found. `work` is about
    as many seconds as the solver counts itself, by what it does: unless the time on the wall runs
    out, the same problem and work always give the same answer.

    >>> from penstock.costs import Costs
    >>> from penstock.ir.placement import Placement
    >>> exact = prove(SchedulingProblem.of(Costs(), Placement.loop(2), 2))
    >>> exact.seconds, exact.is_optimal
    (7.0, True)
    """
    schedule = _one_at_a_time(problem) if start is None else start
    known = Exact(schedule, _seconds(schedule, problem), lower_bound(problem))
    return known if known.is_optimal else _search(problem, known, (seconds, work), progress)


def _search(
    problem: SchedulingProblem,
    known: Exact,
    limits: tuple[float, float | None],
    progress: Progress | None,
) -> Exact:
    library = load_library()
    least = known.lower_bound
    if problem.costs.has_collectives:
        least = lower_bound(replace(problem, costs=problem.costs.without_collectives()))
    filled = make_model(library.CpModel(), problem, least=least, most=known.seconds)
    if problem.is_even:
        add_order(filled)
    add_bytes(filled)
    add_hints(filled, known.schedule)
    filled.model.minimize(filled.step)
    solver = make_solver(library, *limits)
    with kept_interrupt():
        status = solver.solve(filled.model, _make_follower(filled, progress))
    bound = max(known.lower_bound, filled.to_bound(solver.best_objective_bound))
    best = known
    if status in (library.OPTIMAL, library.FEASIBLE):
        schedule = read_schedule(filled, solver.value)
        timeline = simulate(schedule, problem.costs)
        fits = all(map(le, timeline.rank_peak_bytes, problem.memory))
        if fits and timeline.period(problem.boundary) < known.seconds:
            best = Exact(schedule, timeline.period(problem.boundary), bound)
    return replace(best, lower_bound=bound)


def _seconds(schedule: Schedule, problem: SchedulingProblem) -> float:
    return simulate(schedule, problem.costs).period(problem.boundary)


def _make_follower(
    filled: ScheduleModel, progress: Progress | None
) -> CpSolverSolutionCallback | None:
    """Return a callback that reports every better schedule to `progress`."""
    if progress is None:
        return None
    from ortools.sat.python.cp_model import CpSolverSolutionCallback

    tell = progress

    class Follower(CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            seconds = filled.ticks.seconds
            tell(self.objective_value * seconds, self.best_objective_bound * seconds)

    return Follower()


def _one_at_a_time(problem: SchedulingProblem) -> Schedule:
    """Return the schedule with one microbatch at a time, which needs the least room."""
    orders = []
    for rank in range(problem.ranks):
        stages = problem.placement.stages(rank)
        actions: list[Action] = []
        for number in range(problem.microbatches):
            actions += [Action(Kind.FORWARD, stage, number) for stage in stages]
            for stage in reversed(stages):
                actions.append(Action(Kind.BACKWARD_INPUT, stage, number))
                actions.append(Action(Kind.BACKWARD_WEIGHT, stage, number))
        orders.append(actions)
    return Schedule.from_orders(orders, name="one at a time")
