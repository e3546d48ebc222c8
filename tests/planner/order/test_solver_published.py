"""Solved schedules are at least as good as those that others have published, row by row."""

from dataclasses import replace

import pytest

from penstock.checks.report import check
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.order.solver import solve
from penstock.planner.problem import SchedulingProblem
from tests.facts import (
    CONTROLLABLE_MEMORY,
    V_ORDER,
    ZERO_BUBBLE,
    ControllableMemoryRow,
    VOrderRow,
    ZeroBubbleRow,
)
from tests.planner.problems import published_problem

# Rates are published with four digits.
ROUNDING = 5e-5

# A few seconds do on an idle machine.
SECONDS = 15.0


def solved_rate(problem: SchedulingProblem) -> float:
    plan = solve(problem, seconds=SECONDS)
    check(plan.schedule)
    assert plan.keeps_limit
    return plan.timeline.papers_bubble_rate


@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: row.model)
def test_one_activation_per_rank_is_used_as_well_as_by_zb_1p(row: ZeroBubbleRow) -> None:
    problem = published_problem(row, Placement.loop(row.ranks), activations=row.ranks)
    assert solved_rate(problem) <= row.zb_1p + ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("row", ZERO_BUBBLE, ids=lambda row: row.model)
def test_two_activations_per_rank_are_used_as_well_as_by_zb_2p(row: ZeroBubbleRow) -> None:
    problem = published_problem(row, Placement.loop(row.ranks), activations=2 * row.ranks)
    assert solved_rate(problem) <= row.zb_2p + ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("row", ZERO_BUBBLE[:3], ids=lambda row: row.model)
def test_with_more_microbatches_and_two_activations_the_gap_is_below_one_percent(
    row: ZeroBubbleRow,
) -> None:
    few = published_problem(row, Placement.loop(row.ranks), activations=2 * row.ranks)
    many = replace(few, microbatches=4 * row.ranks)
    assert solve(many, seconds=SECONDS).gap <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("row", V_ORDER, ids=lambda row: row.model)
def test_a_v_is_at_least_as_good_as_zb_v_and_the_fixed_order(row: VOrderRow) -> None:
    problem = published_problem(row, Placement.v(row.ranks), activations=2 * row.ranks)
    assert solved_rate(problem) <= min(row.zb_v, row.v_order) + ROUNDING


def controllable(row: ControllableMemoryRow) -> SchedulingProblem:
    """Unit costs, with room for as many microbatches as the family holds from F to W."""
    held = {"V-Min": (row.ranks + 4) // 3, "V-Half": (row.ranks + 2) // 2}[row.family]
    costs = Costs(activation_bytes=1, weight_stash_bytes=1)
    return SchedulingProblem.of(
        costs, Placement.v(row.ranks), row.microbatches, memory=held, boundary="papers"
    )


@pytest.mark.parametrize("row", CONTROLLABLE_MEMORY, ids=lambda row: row.family)
def test_little_memory_is_used_as_well_as_by_the_controllable_families(
    row: ControllableMemoryRow,
) -> None:
    assert solved_rate(controllable(row)) <= row.bubble_rate + ROUNDING


def test_the_least_memory_has_a_bubble_that_is_a_tenth_smaller_than_published() -> None:
    assert solved_rate(controllable(CONTROLLABLE_MEMORY[0])) <= 0.9 * 0.1579
