"""Devices are divided between ranks and replicas, and ranks of different speed get their share."""

import pytest

from penstock.costs import Costs
from penstock.errors import ArgumentError
from penstock.ir.placement import Placement
from penstock.planner.partition.pieces import Piece
from penstock.planner.search.replicas import Reduction, divide_devices
from penstock.planner.search.search import search

LAYERS = [
    Piece(f"layers.{i}", 1, 1, 1, parameter_bytes=8, gradient_bytes=8, optimizer_bytes=16)
    for i in range(8)
]
EFFORT = 20_000


def test_without_cost_of_reduction_replicas_have_no_bubble() -> None:
    best = search(LAYERS, devices=4, batch=8, effort=EFFORT).found[0]
    assert (best.plan.problem.ranks, best.choices.replicas) == (1, 4)
    assert best.seconds == best.plan.seconds == 2 * 24


def test_a_slow_reduction_makes_a_longer_pipeline_the_best() -> None:
    best = search(LAYERS, devices=4, batch=8, reduction_seconds=500.0, effort=EFFORT).found[0]
    assert (best.plan.problem.ranks, best.choices.replicas) == (4, 1)


def test_little_memory_makes_a_longer_pipeline_the_best_unless_state_is_sharded() -> None:
    whole = search(LAYERS, devices=4, batch=8, memory=200, effort=EFFORT).best
    sharded = search(
        LAYERS, devices=4, batch=8, memory=200, shard_optimizer=True, effort=EFFORT
    ).best
    assert whole.problem.ranks == 2
    assert sharded.problem.ranks == 1


def test_the_seconds_of_a_reduction_follow_from_the_gradients_of_the_fullest_rank() -> None:
    costs = Costs(gradient_bytes=[10, 30])
    reduction = Reduction(bandwidth=10.0)
    assert reduction.of(costs, Placement.loop(2), replicas=4) == 2 * 3 / 4 * 30 / 10
    assert reduction.of(costs, Placement.loop(2), replicas=1) == 0
    assert Reduction(seconds={2: 3.0}).of(costs, Placement.loop(2), replicas=2) == 3.0


def test_causes_add_up_to_the_step_with_its_reduction() -> None:
    for one in search(LAYERS, devices=4, batch=8, reduction_seconds=5, effort=EFFORT).found:
        assert one.causes.seconds == pytest.approx(one.seconds)


def test_devices_that_do_not_divide_the_batch_are_left_out() -> None:
    assert list(divide_devices(6, batch=4, most_ranks=8)) == [(3, 2), (6, 1)]


def test_a_slow_rank_gets_fewer_layers() -> None:
    found = search(LAYERS, ranks=2, batch=8, rank_factors=[1, 3], effort=EFFORT).found[0]
    best, layers = found.plan, [0, 0]
    for stage, size in enumerate(found.choices.sizes):
        layers[best.problem.placement.rank_of_stage[stage]] += size
    assert layers == [6, 2]
    assert best.problem.work.tolist() == [144, 144]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 2, "devices": 4}, "give either ranks or devices"),
        ({}, "give either ranks or devices"),
        ({"devices": 4, "memory": [1, 2]}, "memory must be one number if the number of ranks"),
        ({"devices": 4, "rank_factors": [1, 2]}, "rank_factors must be one number if"),
        ({"ranks": 2, "rank_factors": [1, 0]}, "rank_factors must be one number above 0 for each"),
        ({"ranks": 2, "rank_factors": [1]}, "rank_factors must be one number above 0 for each"),
        ({"devices": 4, "reduction_bandwidth": 0}, "bandwidth must be a number of bytes per"),
        ({"devices": 4, "reduction_seconds": -1}, "reduction_seconds must be numbers from 0"),
        ({"devices": 4, "reduction_seconds": {2: 1}}, "must have a number for 4 replicas"),
        ({"ranks": 2, "effort": -1}, "effort must be a number of rows from 0"),
    ],
)
def test_invalid_arguments_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        search(LAYERS, batch=8, **changes)  # type: ignore[arg-type]  # wrong on purpose
