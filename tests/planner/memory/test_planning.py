"""Plans that recompute and offload to keep a byte limit."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import MemoryLimitError
from penstock.planner import plan_memory
from penstock.planner.memory.fitting import (
    BOTH,
    OFFLOAD,
    RECOMPUTE,
    Way,
    fit_order,
    recompute_stages,
)
from penstock.planner.memory.planning import Means
from penstock.planner.order.families import fixed_schedules
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem

# A transformer's layers: F, I and W alike, and a small boundary between stages.
LAYERS = ps.Costs(
    transfer=0.05, activation_bytes=1, weight_stash_bytes=0.4, message_bytes=0.06, host_link=1
)


def half_of_1f1b(costs: ps.Costs, ranks: int) -> list[float]:
    """Room for half of the activations that 1F1B holds on its first rank, on every rank."""
    loop = SchedulingProblem.of(costs, ps.Placement.loop(ranks), 1)
    return [resident + ranks / 2 for resident in loop.resident.tolist()]


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan_memory(
        LAYERS, ranks=4, microbatches=8, memory=half_of_1f1b(LAYERS, 4), seconds=0.5
    )


def test_half_the_memory_costs_less_than_a_tenth_where_the_link_allows_it(planned: Plan) -> None:
    free = ps.plan(LAYERS, ranks=4, microbatches=8, seconds=0.3)
    assert planned.keeps_limit
    assert planned.seconds <= 1.1 * free.seconds
    assert planned.lower_bound <= free.seconds * (1 + 1e-9)


def test_one_means_alone_and_whole_stages_are_never_faster(planned: Plan) -> None:
    problem = SchedulingProblem.of(LAYERS, ps.Placement.loop(4), 8, memory=half_of_1f1b(LAYERS, 4))
    for family in ("1F1B", "ZB-H1", "ZB-H2", "GPipe"):
        timeline = ps.simulate(ps.build(family, ranks=4, microbatches=8), problem.costs)
        ways = [[Way(means)] * 4 for means in (RECOMPUTE, OFFLOAD, BOTH)]
        found = [fit_order(problem, timeline, way) for way in ways]
        for schedule in [*found, recompute_stages(problem, timeline)]:
            if schedule is not None:
                ps.check(schedule)
                other = ps.simulate(schedule, problem.costs)
                assert planned.seconds <= other.end_time * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(4, 16), (6, 12), (8, 32), (12, 24), (16, 32)]
)
def test_half_the_memory_is_nearly_as_fast_as_all_for_up_to_16_ranks(
    ranks: int, microbatches: int
) -> None:
    limit, effort = half_of_1f1b(LAYERS, ranks), 100_000

    def planned(means: Means) -> Plan:
        return plan_memory(
            LAYERS,
            ranks=ranks,
            microbatches=microbatches,
            memory=limit,
            means=means,
            effort=effort,
        )

    free = ps.plan(LAYERS, ranks=ranks, microbatches=microbatches, effort=effort)
    found = planned("both")
    assert found.keeps_limit
    assert free.lower_bound <= found.seconds <= 1.1 * free.seconds
    for alone in (planned("recompute"), planned("offload")):
        assert found.seconds <= alone.seconds * (1 + 1e-9)
    problem = SchedulingProblem.of(LAYERS, ps.Placement.loop(ranks), microbatches, memory=limit)
    for schedule in fixed_schedules(problem):
        whole = recompute_stages(problem, ps.simulate(schedule, problem.costs))
        if whole is not None:
            assert found.seconds <= ps.simulate(whole, problem.costs).end_time * (1 + 1e-9)


def test_without_a_link_nothing_is_offloaded() -> None:
    costs = ps.Costs(activation_bytes=1, message_bytes=0.1)
    found = plan_memory(costs, ranks=4, microbatches=6, memory=2.6, placement="loop", seconds=0.5)
    assert found.keeps_limit
    assert not found.schedule.rows.has_kind(ps.Kind.OFFLOAD, ps.Kind.RELOAD)
    assert found.schedule.rows.has_kind(ps.Kind.RECOMPUTE)


def test_enough_memory_needs_no_memory_actions() -> None:
    found = plan_memory(LAYERS, ranks=2, microbatches=4, memory=100, placement="loop", seconds=0.3)
    assert not found.schedule.rows.has_memory_actions
    assert found.gap == pytest.approx(
        ps.plan(LAYERS, ranks=2, microbatches=4, placement="loop", seconds=0.3).gap
    )


def test_a_plan_says_what_it_buys_and_survives_its_file(planned: Plan, tmp_path: Path) -> None:
    lines = [line.split(" saves up to ")[0] for line in str(planned).split("\n")]
    assert any(
        line.startswith("offloading ") and " forwards on ranks 0 1" in line for line in lines
    )
    path = tmp_path / "plan.json"
    planned.to_file(path)
    again = Plan.from_file(path)
    assert again.schedule == planned.schedule
    assert again.lower_bound == pytest.approx(planned.lower_bound)
    assert again.seconds == planned.seconds


def test_a_limit_below_one_microbatch_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match="for one microbatch at a time"):
        plan_memory(LAYERS, ranks=2, microbatches=4, memory=0.5, seconds=0.1)


def every_order(actions: tuple[tuple[str, ...], ...]) -> Iterator[list[str]]:
    """Yield all ways to merge lists."""
    if not any(actions):
        yield []
    for number, column in enumerate(actions):
        if column:
            rest = (*actions[:number], column[1:], *actions[number + 1 :])
            for order in every_order(rest):
                yield [column[0], *order]


@pytest.mark.slow
@pytest.mark.parametrize(("link", "capacity"), [(1.0, 1.3), (4.0, 1.3), (None, 1.3), (0.6, 2.0)])
def test_small_plans_are_as_fast_as_the_best_of_all_orders(
    link: float | None, capacity: float
) -> None:
    costs = ps.Costs(activation_bytes=1, input_bytes=0.2, host_link=link)
    microbatches, last = 2, ["1F0", "1B0", "1F1", "1B1"]
    ways = [["F", "B"], ["F", "RECOMPUTE", "B"], ["F", "OFFLOAD", "RELOAD", "B"]]
    best = float("inf")
    for chosen in product(ways, repeat=microbatches):
        columns = tuple(tuple(f"0{a}{m}" for a in way) for m, way in enumerate(chosen))
        for order in every_order(columns):
            schedule = ps.Schedule.from_orders([order, last])
            if ps.checks.find_problems(schedule):
                continue
            timeline = ps.simulate(schedule, costs)
            if timeline.rank_peak_bytes[0] <= capacity:
                best = min(best, timeline.end_time)
    found = plan_memory(
        costs,
        ranks=2,
        microbatches=microbatches,
        memory=[capacity, 9.0],
        placement="loop",
        seconds=1,
    )
    assert found.keeps_limit
    assert found.seconds <= best * (1 + 1e-9)
