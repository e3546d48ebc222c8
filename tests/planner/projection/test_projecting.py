"""From layers of one device to a cluster."""

from dataclasses import replace

import pytest

from penstock.costs import Costs
from penstock.errors import ArgumentError, MemoryLimitError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.partition.pieces import Piece
from penstock.planner.projection.cluster import Cluster
from penstock.planner.projection.layout import Degrees, degrees_for
from penstock.planner.projection.projecting import Assumptions, project, project_all
from penstock.planner.projection.projection import projection_table

BLOCK = Piece(
    "block",
    forward=1.0,
    backward_input=1.0,
    backward_weight=1.0,
    parameter_bytes=2.0,
    gradient_bytes=4.0,
    optimizer_bytes=8.0,
    activation_bytes=3.0,
    message_bytes=10.0,
)
LAYERS = [BLOCK] * 8
CLUSTER = Cluster(
    nodes=4,
    devices_per_node=2,
    bandwidth_inside=100.0,
    bandwidth_between=10.0,
    latency_inside=0.01,
    latency_between=0.1,
)


def test_devices_count_tensor_first_then_pipeline_then_data() -> None:
    degrees = Degrees(tensor=1, pipeline=4, data=2)
    inside = [degrees.is_link_inside(CLUSTER, rank, rank + 1) for rank in range(3)]
    assert inside == [True, False, True]
    assert Degrees(2, 2, 2).is_tensor_inside(CLUSTER)
    assert not Degrees(2, 2, 2).is_data_inside(CLUSTER)
    assert Degrees(1, 1, 2).is_data_inside(replace(CLUSTER, nodes=1))


def test_a_pipeline_that_begins_inside_a_node_crosses_where_others_do_not() -> None:
    # Pipelines of three ranks on nodes of two: the second begins in the middle of a node.
    cluster = replace(CLUSTER, nodes=3)
    degrees = Degrees(tensor=1, pipeline=3, data=2)
    assert not degrees.is_link_inside(cluster, 0, 1)
    assert not degrees.is_link_inside(cluster, 1, 2)


def test_costs_are_those_of_the_model_by_hand() -> None:
    given = Assumptions(tensor_efficiency=0.8, tensor_overlap=0.5)
    found = project(LAYERS, CLUSTER, Degrees(2, 2, 2), microbatches=8, assumptions=given)
    costs = found.plan.problem.costs
    # Half of two all-reduces of 10 bytes on 2 devices: 2 hops of 5 bytes each.
    collectives = 0.5 * 2 * 2 * (0.01 + 5 / 100)
    layer = 1 / 1.6 + collectives
    assert costs.forward == pytest.approx((4 * layer,) * 2)
    assert costs.backward_weight == pytest.approx((4 / 1.6,) * 2)
    assert costs.activation_bytes == (6.0, 6.0)
    assert costs.optimizer_bytes == (16.0, 16.0)
    # A message of 5 bytes to another node.
    assert costs.per_link(2)[0, 1] == pytest.approx(0.1 + 5 / 10)
    # Gradients of 4 layers, half on each device, around a ring of two nodes.
    assert found.reduction_seconds == pytest.approx((2 * (0.1 + 4 / 10),) * 2)
    assert found.plan.problem.microbatches == 4


@pytest.mark.parametrize("degrees", list(degrees_for(CLUSTER, layers=8, microbatches=16)), ids=str)
def test_seconds_add_up_in_every_layout(degrees: Degrees) -> None:
    given = Assumptions(data_overlap=0.25, optimizer_seconds=0.5)
    found = project(LAYERS, CLUSTER, degrees, microbatches=16, assumptions=given)
    assert sum(found.by_cause.values()) == pytest.approx(found.seconds)
    assert all(seconds >= -1e-9 for seconds in found.by_cause.values())
    assert found.by_cause["optimizer"] == 0.5


def test_one_device_takes_what_was_measured() -> None:
    one = Cluster(nodes=1, devices_per_node=1, bandwidth_inside=1, bandwidth_between=1)
    found = project(LAYERS, one, Degrees(1, 1, 1), microbatches=4)
    assert found.seconds == pytest.approx(4 * 8 * 3)
    faster = project(LAYERS, replace(one, speed=2.0), Degrees(1, 1, 1), microbatches=4)
    assert faster.seconds == pytest.approx(found.seconds / 2)


def test_optimizer_state_may_be_divided_over_replicas() -> None:
    plain, sharded = (
        project(
            LAYERS,
            CLUSTER,
            Degrees(1, 2, 4),
            microbatches=8,
            assumptions=Assumptions(shard_optimizer=shards),
        )
        for shards in (False, True)
    )
    saved = plain.plan.timeline.peak_bytes - sharded.plan.timeline.peak_bytes
    assert saved == pytest.approx(4 * 8.0 * 3 / 4)


def test_all_layouts_are_compared_the_fastest_first_and_only_those_that_fit() -> None:
    found = project_all(LAYERS, CLUSTER, microbatches=16, tokens_per_microbatch=100)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert {one.degrees.devices for one in found} == {8}
    table = projection_table(found).splitlines()
    assert len(table) == len(found) + 1
    assert table[0].split()[:4] == ["tensor", "pipeline", "data", "step"]
    tight = project_all(LAYERS, replace(CLUSTER, memory=60.0), microbatches=16)
    assert 0 < len(tight) < len(found)
    assert all(one.plan.timeline.peak_bytes <= 60 for one in tight)
    with pytest.raises(MemoryLimitError, match="no way to use 8 devices fits into 1 bytes each"):
        project_all(LAYERS, replace(CLUSTER, memory=1.0), microbatches=16)


def test_the_planner_may_look_for_a_better_order() -> None:
    uneven = [replace(BLOCK, forward=2.0), *LAYERS[1:]]
    family, planned = (
        project(uneven, CLUSTER, Degrees(1, 4, 2), microbatches=16, seconds=seconds)
        for seconds in (0.0, 0.3)
    )
    assert planned.seconds <= family.seconds
    assert planned.plan.problem.placement == Placement.loop(4)
    assert isinstance(planned.plan.problem.costs, Costs)


@pytest.mark.parametrize(
    ("degrees", "microbatches", "message"),
    [
        (Degrees(2, 2, 1), 8, "the degrees must use all devices (devices: 8, tensor 2, "),
        (Degrees(1, 2, 4), 6, "replicas must get equal numbers of microbatches (microbatches: 6"),
    ],
)
def test_layouts_that_do_not_fit_the_cluster_are_refused(
    degrees: Degrees, microbatches: int, message: str
) -> None:
    with pytest.raises(SizeError) as caught:
        project(LAYERS, CLUSTER, degrees, microbatches=microbatches)
    assert str(caught.value).startswith(message)


def test_wrong_assumptions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="data_overlap must be a share from 0 to 1"):
        Assumptions(data_overlap=1.5)
    with pytest.raises(ArgumentError, match="tensor_efficiency must be above 0"):
        Assumptions(tensor_efficiency=0.0)
    with pytest.raises(ArgumentError, match="bandwidth_inside must be above 0"):
        replace(CLUSTER, bandwidth_inside=0.0)
    with pytest.raises(ArgumentError, match="nodes must be a whole number from 1"):
        replace(CLUSTER, nodes=0)
