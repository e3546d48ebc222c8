"""Planning for given costs: the fastest schedule that keeps a memory limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.costs import Costs
from penstock.costs.given import costs_or_unit
from penstock.errors import MemoryLimitError
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import require_effort, require_seconds
from penstock.planner.order.solver import Progress, solve
from penstock.planner.plans import Plan, require_plans
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.checkpointing import checkpoint, is_worth_checkpointing
from penstock.planner.search.layouts import (
    Layout,
    describe_placement,
    find_placement,
    placements_for,
)
from penstock.schedules.sizes import require_size
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary

__all__ = ["plan"]


def plan(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory: float | Sequence[float] | None = None,
    placement: Placement | Layout | None = None,
    boundary: Boundary = DEFAULT_BOUNDARY,
    seconds: float = 5.0,
    effort: float | None = None,
    known: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find the fastest schedule that keeps a memory limit, and prove how good it is.

    Single numbers in `costs` are one rank's share of the model, and are divided among its stages;
    lists give the costs of each stage. `placement` is "loop" (one stage per rank),
    "interleaved", "v", or any `Placement`; without it, those that the costs allow are tried and
    the fastest is kept. `memory` is bytes per rank, one number or one per rank.

    `seconds` is how long to look, in processor seconds, for all placements together: a busy
    machine takes longer instead of finding less. `effort` says instead how many rows of orders to
    build for each placement, and no clock ends that: the same effort gives the same plan
    everywhere, more effort never gives a slower one, and a named placement is never better than
    the choice.

    `known` are plans to begin with, for the same ranks and microbatches: the answer is never
    slower than one of them that keeps this limit, at these costs. So give the plan for a tighter
    limit, or the one that runs. With a named placement, those with another one are left out, and
    always those that recompute or offload; see `plan_memory`.

    `boundary` is what happens between two steps, which decides what a step costs: by default the
    time until the last rank ends, since ranks of a `Pipeline` meet then; see
    `penstock.sim.period`.

    >>> found = plan(Costs(activation_bytes=1), ranks=2, microbatches=4, memory=2, seconds=1)
    >>> round(found.seconds, 3), round(found.gap, 3)
    (12.5, 0.0)
    """
    require_size(ranks, microbatches)
    require_seconds(seconds)
    require_effort(effort)
    require_plans(known)
    costs = costs_or_unit(costs)
    request = _Request(costs, ranks, microbatches, memory, boundary)
    if placement is not None:
        chosen = [find_placement(placement, ranks, costs)]
    else:
        chosen = list(placements_for(costs, ranks))
        chosen += _other_placements(known, chosen, costs, ranks)
    orders = [plan.schedule for plan in known]
    return _solve_best(request.problems(chosen), seconds, effort, orders, progress)


def _other_placements(
    known: Sequence[Plan], chosen: Sequence[Placement], costs: Costs, ranks: int
) -> list[Placement]:
    """Return the placements of known plans that are not chosen, if these costs are for them."""
    found = dict.fromkeys(plan.problem.placement for plan in known)
    fits = {placement.num_stages for placement in placements_for(costs, ranks)}
    return [
        placement
        for placement in found
        if placement.num_ranks == ranks
        and placement.num_stages in fits
        and placement not in chosen
    ]


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of a plan, apart from the placement."""

    costs: Costs
    ranks: int
    microbatches: int
    memory: float | Sequence[float] | None
    boundary: Boundary

    def problems(self, placements: Sequence[Placement]) -> list[SchedulingProblem]:
        """Return the problems with these placements that fit; raise an error if none does."""
        found, refused = [], []
        for placement in placements:
            try:
                found.append(self.problem(placement))
            except MemoryLimitError as error:
                refused.append(error)
        if not found:
            raise MemoryLimitError(f"{refused[0]}{self._way_out()}") from refused[0]
        return found

    def problem(self, placement: Placement, *, is_checkpointed: bool = False) -> SchedulingProblem:
        """Return the problem with this placement; raise an error if nothing keeps the limit."""
        stages = placement.num_stages
        costs = self.costs.recut(self.ranks, stages)
        if is_checkpointed:
            costs = checkpoint(costs, range(stages), stages)
        return SchedulingProblem.of(
            costs, placement, self.microbatches, self.memory, boundary=self.boundary
        )

    def _way_out(self) -> str:
        """Return advice on what would keep the limit, to end an error message with."""
        for is_checkpointed in (False, True):
            for placement in placements_for(self.costs, self.ranks):
                costs = self.costs.recut(self.ranks, placement.num_stages)
                if is_checkpointed and not is_worth_checkpointing(costs, placement.num_stages):
                    continue
                try:
                    self.problem(placement, is_checkpointed=is_checkpointed)
                except MemoryLimitError:
                    continue
                way = f"placement {describe_placement(placement)!r}"
                return f"; {way} fits" + (" if its stages are checkpointed" * is_checkpointed)
        return ""


def _solve_best(
    problems: Sequence[SchedulingProblem],
    seconds: float,
    effort: float | None,
    known: Sequence[Schedule],
    progress: Callable[[Progress], None] | None,
) -> Plan:
    """Solve the most promising first, and skip those that cannot be faster.

    Each gets the same, so that the plan does not depend on how fast the others were solved.
    """
    share = seconds / len(problems)
    bounds = {number: lower_bound(problem) for number, problem in enumerate(problems)}
    best: Plan | None = None
    is_cut_short = False
    for number in sorted(bounds, key=lambda number: bounds[number]):
        if best is not None and bounds[number] >= best.seconds:
            continue
        found = solve(
            problems[number], seconds=share, effort=effort, known=known, progress=progress
        )
        is_cut_short |= found.is_cut_short
        if best is None or found.seconds < best.seconds:
            best = found
    assert best is not None, "there is at least one problem"
    return replace(best, is_cut_short=is_cut_short and best.gap > 0)
