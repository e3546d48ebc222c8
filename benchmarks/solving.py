"""Solved schedules beside published ones: bubble rates, the proven bound, and the time it took.

    PYTHONPATH=. python benchmarks/solving.py                    every row, 5 seconds each
    PYTHONPATH=. python benchmarks/solving.py --seconds 20       with more time

Costs and published rates are those in tests/facts.py, priced by the rules in docs/design.md: the
bubble rate is 1 - work / longest span, as in the papers. The last tables are for what is not
published: other limits and sizes, and uneven models beside the best fixed family that keeps the
same limit, once until the last rank ends and once if no rank waits between steps. Prints its
tables and writes them to benchmarks/results/solving.md.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

import numpy as np

from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.solver import solve
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.sim.engine import simulate
from penstock.sim.period import Boundary, name_seconds
from result_files import write_result
from tests.facts import CONTROLLABLE_MEMORY, V_ORDER, ZERO_BUBBLE
from tests.planner.problems import published_problem


@dataclass(frozen=True)
class Row:
    """A problem with a name, what its limit is, and the rate that others have reached."""

    name: str
    limit: str
    problem: SchedulingProblem
    published: float | None = None

    @property
    def size(self) -> str:
        return f"{self.problem.ranks} x {self.problem.microbatches}"


@dataclass(frozen=True)
class Solved:
    """A plan and the seconds that it took to find."""

    row: Row
    plan: Plan
    seconds: float

    def rate(self, span: float) -> float:
        return max(0.0, 1 - float(self.row.problem.work.max()) / span)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    seconds = parser.parse_args().seconds
    _solve(next(one_activation()), seconds=5.0)  # loads what is loaded once
    sections = {
        "One stage per rank, room for p activations": one_activation(),
        "One stage per rank, room for 2p activations": two_activations(),
        "Two stages per rank in a V, room for 2p of their activations": v(),
        "V, unit costs, little memory": little_memory(),
        "Other limits and sizes, of which nothing is published": unpublished(),
    }
    tables = [
        *(rates_table(title, rows, seconds) for title, rows in sections.items()),
        uneven_table(seconds, "everything"),
        uneven_table(seconds, "nothing"),
    ]
    spread = f"one run on one core, at most {seconds:g} s for each row"
    print(write_result("solving", "Beside published schedules", tables, spread=spread))


def one_activation() -> Iterator[Row]:
    for row in ZERO_BUBBLE:
        problem = published_problem(row, Placement.loop(row.ranks), activations=row.ranks)
        yield Row(row.model, "p", problem, row.zb_1p)


def two_activations() -> Iterator[Row]:
    for row in ZERO_BUBBLE:
        problem = published_problem(row, Placement.loop(row.ranks), activations=2 * row.ranks)
        yield Row(row.model, "2p", problem, row.zb_2p)


def v() -> Iterator[Row]:
    for row in V_ORDER:
        problem = published_problem(row, Placement.v(row.ranks), activations=2 * row.ranks)
        yield Row(row.model, "2p", problem, min(row.zb_v, row.v_order))


def little_memory() -> Iterator[Row]:
    for row in CONTROLLABLE_MEMORY:
        held = {"V-Min": (row.ranks + 4) // 3, "V-Half": (row.ranks + 2) // 2}[row.family]
        costs = Costs(activation_bytes=1, weight_stash_bytes=1)
        problem = SchedulingProblem.of(
            costs, Placement.v(row.ranks), row.microbatches, memory=held, boundary="papers"
        )
        yield Row(row.family, f"{held} microbatches", problem, row.bubble_rate)


def unpublished() -> Iterator[Row]:
    for model in (1, 2):
        row = ZERO_BUBBLE[model]
        for share in (1.25, 1.5, 1.75):
            activations = int(share * row.ranks)
            problem = published_problem(row, Placement.loop(row.ranks), activations=activations)
            yield Row(row.model, f"{share:g}p", problem)
    for row in ZERO_BUBBLE:
        few = published_problem(row, Placement.loop(row.ranks), activations=2 * row.ranks)
        yield Row(row.model, "2p", replace(few, microbatches=4 * row.ranks))
    row = replace(ZERO_BUBBLE[-1], ranks=64, microbatches=512)
    for placement in (Placement.loop(64), Placement.v(64)):
        problem = published_problem(row, placement, activations=2 * row.ranks)
        yield Row(f"28.3B's costs, {placement.style}", "2p", problem)


def rates_table(title: str, rows: Iterator[Row], seconds: float) -> str:
    lines = [
        f"## {title}",
        "",
        "| | ranks x microbatches | limit | published | solved | bound | gap | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        solved = _solve(row, seconds)
        published = "" if row.published is None else f"{row.published:.4f}"
        lines.append(
            f"| {row.name} | {row.size} | {row.limit} | {published} "
            f"| {solved.rate(solved.plan.timeline.longest_span):.4f} "
            f"| {solved.rate(solved.plan.lower_bound):.4f} | {max(0, solved.plan.gap):.2%} "
            f"| {solved.seconds:.1f} |"
        )
    return "\n".join(lines)


def uneven_table(seconds: float, boundary: Boundary) -> str:
    """Eight ranks, F = I = 1 and W = 0.7 but for what is uneven; an activation is 1 byte."""
    lines = [
        f"## Uneven models, 8 ranks, 16 microbatches: {name_seconds(boundary)}",
        "",
        "| | limit | best family | solved | faster by | bound | gap | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in uneven(boundary):
        solved = _solve(row, seconds)
        step, family = solved.plan.seconds, _best_family(row.problem)
        lines.append(
            f"| {row.name} | {row.limit} | {family:.2f} | {step:.2f} "
            f"| {family / step - 1:.1%} | {solved.plan.lower_bound:.2f} "
            f"| {max(0, solved.plan.gap):.2%} | {solved.seconds:.1f} |"
        )
    return "\n".join(lines)


def uneven(boundary: Boundary) -> Iterator[Row]:
    ones, less = [1.0] * 8, [0.7] * 8
    slow_link = [[0.5 if {a, b} == {3, 4} else 0.03 for a in range(8)] for b in range(8)]
    slow = [1.15 if stage == 4 else 1.0 for stage in range(8)]
    models = {
        "embedding: first F x 1.2": Costs([1.2, *ones[1:]], ones, less, transfer=0.03),
        "head: last stage x 1.25": Costs(
            [*ones[1:], 1.25], [*ones[1:], 1.25], [*less[1:], 0.875], transfer=0.03
        ),
        "one rank slower by 15 %": Costs(slow, slow, [0.7 * s for s in slow], transfer=0.03),
        "one link slower: half an F": Costs(ones, ones, less, transfer=slow_link),
    }
    for limit in (8, 10, 13, 16):
        for name, costs in models.items():
            sized = Costs(
                costs.forward,
                costs.backward_input,
                costs.backward_weight,
                transfer=costs.transfer,
                activation_bytes=1,
                weight_stash_bytes=0.5,
            )
            problem = SchedulingProblem.of(
                sized, Placement.loop(8), 16, memory=limit, boundary=boundary
            )
            yield Row(name, str(limit), problem)


def _best_family(problem: SchedulingProblem) -> float:
    timelines = [simulate(schedule, problem.costs) for schedule in fixed_schedules(problem)]
    limit = np.array(problem.memory)
    fitting = [t for t in timelines if (np.array(t.rank_peak_bytes) <= limit).all()]
    return min((t.period(problem.boundary) for t in fitting), default=inf)


def _solve(row: Row, seconds: float) -> Solved:
    begin = perf_counter()
    plan = solve(row.problem, seconds=seconds)
    return Solved(row, plan, perf_counter() - begin)


if __name__ == "__main__":
    main()
