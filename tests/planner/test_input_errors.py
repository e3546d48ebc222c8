"""What planning refuses is refused by name, with the value and what to write instead.

These were bare TypeErrors and AttributeErrors, or were accepted: the first use of a value failed
wherever it happened to be, long after the call.
"""

from math import nan
from typing import Any

import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import ArgumentError, CostsError, MemoryLimitError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.curve_planning import memory_curve
from penstock.planner.order.solver import solve
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.planning import plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.reordering import Reordering
from penstock.planner.search.search import search
from penstock.sim.comparison import compare
from penstock.sim.engine import simulate
from penstock.sim.explain import explain

NO_COSTS = (
    "costs must be a Costs (got a value of type dict); write Costs(forward=1), or "
    "Costs.from_mapping for names and numbers"
)
LAYERS = [Piece(name, forward=1.0, activation_bytes=1.0) for name in "abcd"]


def no_memory(value: str) -> str:
    return (
        f"memory must be a number of bytes from 0, or one per rank (got {value}); "
        "write 80e9 for 80 GB"
    )


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": "80GB"}, ArgumentError, no_memory("'80GB'")),
    ({"memory": [1, "2"]}, ArgumentError, no_memory("'2'")),
    ({"memory": nan}, ArgumentError, no_memory("nan")),
    ({"memory": -1}, ArgumentError, no_memory("-1")),
    (
        {"memory": [1, 2, 3]},
        SizeError,
        "memory must be one limit, or one per rank (ranks: 2, got 3)",
    ),
    ({"ranks": 2.0}, SizeError, "ranks must be a whole number (got 2.0); write ranks=2"),
    ({"ranks": 2.5}, SizeError, "ranks must be a whole number (got 2.5)"),
    ({"ranks": "2"}, SizeError, "ranks must be a whole number (got '2')"),
    ({"ranks": True}, SizeError, "ranks must be a whole number (got True)"),
    ({"seconds": "1"}, ArgumentError, "seconds must be a number from 0 (got '1')"),
    ({"seconds": -1}, ArgumentError, "seconds must be a number from 0 (got -1)"),
    ({"seconds": nan}, ArgumentError, "seconds must be a number from 0 (got nan)"),
    (
        {"boundary": "barrier"},
        ArgumentError,
        "boundary must be one of 'everything', 'gradients', 'nothing', 'papers' (got 'barrier')",
    ),
    ({"known": "plan"}, ArgumentError, "known must be a list of plans (got 'plan')"),
    ({"known": [1]}, ArgumentError, "known must be a list of plans (got [1])"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), REFUSED, ids=lambda value: str(value)[:20]
)
def test_plan_and_search_refuse_the_same_values_in_the_same_words(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings: dict[str, Any] = {"ranks": 2, "seconds": 0.1} | change
    with pytest.raises(error) as planned:
        plan(Costs(), microbatches=2, **settings)
    assert str(planned.value) == message
    with pytest.raises(error) as searched:
        search(LAYERS, batch=2, **settings)
    assert str(searched.value) == message


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["1GB"], no_memory("'1GB'")),
        (3, "limits must not be empty; give at least one number of bytes (got 3)"),
        ([], "limits must not be empty; give at least one number of bytes (got [])"),
    ],
)
def test_limits_of_a_curve_are_numbers(limits: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        memory_curve(Costs(), ranks=2, microbatches=2, limits=limits)
    assert str(caught.value) == message


@pytest.mark.parametrize("seconds", [-1, "1", [1], [1, nan]])
def test_seconds_of_an_optimizer_are_one_number_or_one_per_rank(seconds: Any) -> None:
    timeline = simulate(build("1F1B", ranks=2, microbatches=2))
    with pytest.raises(ArgumentError, match="optimizer_seconds must be a number from 0, or one"):
        timeline.period("gradients", optimizer_seconds=seconds)


def test_sizes_that_are_not_whole_numbers_are_refused() -> None:
    with pytest.raises(SizeError, match=r"^microbatches must be a whole number \(got 2.0\)"):
        plan(Costs(), ranks=2, microbatches=2.0, seconds=0.1)  # type: ignore[arg-type]  # refused
    with pytest.raises(SizeError, match=r"^batch must be a whole number \(got '2'\)"):
        search(LAYERS, ranks=2, batch="2")  # type: ignore[arg-type]  # refused
    with pytest.raises(
        SizeError, match=r"^ranks must be a whole number \(got 4.0\); write ranks=4"
    ):
        build("1F1B", ranks=4.0, microbatches=8)  # type: ignore[arg-type]  # refused


def test_costs_that_are_not_costs_are_refused_everywhere() -> None:
    schedule, costs = build("1F1B", ranks=2, microbatches=2), {"forward": 1}
    given: Any = costs
    calls = (
        lambda: plan(given, ranks=2, microbatches=2),
        lambda: simulate(schedule, given),
        lambda: explain(schedule, given),
        lambda: compare([schedule], given),
        lambda: SchedulingProblem.of(given, schedule.placement, 2),
        lambda: Reordering(schedule, given),
    )
    for call in calls:
        with pytest.raises(CostsError) as caught:
            call()
        assert str(caught.value) == NO_COSTS


def test_seconds_of_a_solver_are_checked() -> None:
    problem = SchedulingProblem.of(Costs(), Placement.loop(2), 2)
    with pytest.raises(ArgumentError) as caught:
        solve(problem, seconds=-0.5)
    assert str(caught.value) == "seconds must be a number from 0 (got -0.5)"


def test_sum_that_exceeds_a_limit_by_its_last_bit_fits() -> None:
    # 0.1 + 0.2 is 0.30000000000000004; it was refused as "needs 0 bytes, limit of 0".
    costs = Costs(activation_bytes=[0.1 + 0.2] * 2)
    found = plan(costs, ranks=2, microbatches=2, memory=0.3, seconds=0.1)
    assert found.keeps_limit
    layers = [Piece(name, forward=1.0, activation_bytes=0.1 + 0.2) for name in "ab"]
    assert search(layers, ranks=2, batch=2, memory=0.3, seconds=0.1).best.keeps_limit


def test_few_bytes_are_named_with_their_fraction() -> None:
    with pytest.raises(MemoryLimitError) as caught:
        plan(Costs(activation_bytes=[0.5] * 2), ranks=2, microbatches=2, memory=0.3)
    assert str(caught.value).startswith(
        "rank 0 needs 0.5 bytes for one microbatch at a time (0 of them all the time), 0.2 more "
        "than its limit of 0.3; a limit of 0.5 bytes per rank would do"
    )


def test_advice_can_be_followed_where_there_is_nothing_to_cut() -> None:
    # The advice was to use 0 stages or fewer.
    with pytest.raises(SizeError) as caught:
        search([], ranks=2, batch=2)
    assert str(caught.value) == "layers must not be empty; give at least one layer per rank"
    with pytest.raises(SizeError) as caught:
        partition([], Placement.loop(2))
    assert str(caught.value) == "pieces must not be empty; give at least one piece per stage"
    with pytest.raises(ArgumentError) as refused:
        partition(LAYERS, 2)  # type: ignore[arg-type]  # refused
    assert str(refused.value) == "placement must be a Placement (got 2); write Placement.loop(4)"
