"""The optimal schedule of a small problem in which what forwards save may give way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.ir.actions import Kind
from penstock.ir.lookup import find_memory_rows
from penstock.ir.rows import ABSENT
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.exact.constraint_solver import (
    kept_interrupt,
    load_library,
    make_solver,
)
from penstock.planner.exact.giving_way import Ways, add_ways
from penstock.planner.exact.hints import add_hints, read_schedule
from penstock.planner.exact.model import ScheduleModel, make_model
from penstock.planner.exact.prove import Exact
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar

__all__ = ["prove_memory"]

# What just fits may exceed a limit by the last bits of a sum.
_ROUNDING = 1e-9


def prove_memory(
    problem: SchedulingProblem,
    *,
    start: Schedule,
    means: frozenset[Kind] = frozenset({Kind.RECOMPUTE, Kind.OFFLOAD}),
    seconds: float,
    work: float | None = None,
) -> Exact:
    """Search for the best schedule that may recompute and offload, and for a proof.

    `start` keeps the limits, and the answer is never worse. The boundary must be one at which a
    step lasts until the last rank ends, and the costs without `overlap_gain`. `means` says whether
    it may recompute or offload. `seconds` and `work` are those of `prove`.
    """
    assert problem.lasts_until_all_end, "ranks with spans of their own are not modelled"
    free = problem.without_limit
    known = Exact(start, simulate(start, problem.costs).end_time, lower_bound(free))
    if known.is_optimal:
        return known
    library = load_library()
    least = lower_bound(replace(free, costs=free.costs.without_collectives()))
    filled = make_model(library.CpModel(), free, least=least, most=known.seconds)
    _add_order(filled)
    ways = add_ways(filled, problem, means)
    _add_hints(filled, ways, start)
    filled.model.minimize(filled.step)
    solver = make_solver(library, seconds, work)
    with kept_interrupt():
        status = solver.solve(filled.model)
    known = replace(
        known, lower_bound=max(known.lower_bound, filled.to_bound(solver.best_objective_bound))
    )
    if status not in (library.OPTIMAL, library.FEASIBLE):
        return known
    more = [timed for way in ways for timed in way.timed_actions(solver.value)]
    return _better(problem, known, read_schedule(filled, solver.value, more))


def _better(problem: SchedulingProblem, known: Exact, schedule: Schedule) -> Exact:
    """Return what is known with another schedule, if that is faster and keeps the limits."""
    timeline = simulate(schedule, problem.costs)
    pairs = zip(timeline.rank_peak_bytes, problem.memory, strict=True)
    fits = all(peak <= limit * (1 + _ROUNDING) for peak, limit in pairs)
    if not fits or timeline.end_time >= known.seconds:
        return known
    return replace(known, schedule=schedule, seconds=timeline.end_time)


def _add_order(filled: ScheduleModel) -> None:
    """Number microbatches of equal size as the first stage begins them."""
    if filled.problem.is_even:
        for one, other in pairwise(filled.forward[0]):
            filled.model.add(other.start >= one.end)


def _add_hints(filled: ScheduleModel, ways: list[Ways], schedule: Schedule) -> None:
    """Start the search at a schedule with its memory actions."""
    add_hints(filled, schedule)
    timeline = simulate(schedule, filled.problem.costs.without_collectives())
    rows = find_memory_rows(schedule)

    def hint(variable: IntVar, seconds: float) -> None:
        filled.model.add_hint(variable, filled.ticks.down(seconds))

    for way in ways:
        place = way.stage, way.microbatch
        again, out, back = (
            int(rows[kind][place]) for kind in (Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD)
        )
        if way.recomputed is not None:
            filled.model.add_hint(way.recomputed.is_there, again != ABSENT)
            if again != ABSENT:
                hint(way.recomputed.start, timeline.start[again])
        if way.offloaded is not None:
            filled.model.add_hint(way.offloaded.is_there, out != ABSENT)
            if out != ABSENT:
                hint(way.offloaded.out, timeline.end[out])
                hint(way.offloaded.back, timeline.start[back])
