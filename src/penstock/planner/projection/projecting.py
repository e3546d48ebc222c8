"""Project layers that were measured on one device to a cluster.

layers of one device -> layers of one rank (tensor parallel) -> stages -> an order -> a step
                                                                                       |
                                gradients are reduced over the replicas  <-------------+
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isinf

import numpy as np

from penstock.errors import ArgumentError, MemoryLimitError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.solver import solve
from penstock.planner.partition.partition import partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.projection.cluster import Cluster
from penstock.planner.projection.layout import Degrees, degrees_for
from penstock.planner.projection.projection import Projection
from penstock.sim.throughput import Workload
from penstock.untrusted import quote, to_quantity

__all__ = ["Assumptions", "project", "project_all"]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a projection assumes, beyond measured layers and links.

    `tensor_efficiency` is the share of its ideal speed-up that a layer's compute keeps when it is
    divided over devices. `tensor_reductions` is how many all-reduces of `message_bytes` a layer
    runs in F, and again in I (2 in transformer blocks); `tensor_overlap` is the share of their
    seconds hidden behind compute. `data_overlap` is the share of the reduction of gradients over
    replicas that is hidden behind compute. With `shard_optimizer`, each replica keeps its part of
    the optimizer's state. `optimizer_seconds` follow every step.
    """

    tensor_efficiency: float = 1.0
    tensor_reductions: int = 2
    tensor_overlap: float = 0.0
    data_overlap: float = 0.0
    shard_optimizer: bool = False
    optimizer_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_share = field.name in ("tensor_efficiency", "tensor_overlap", "data_overlap")
            if to_quantity(float(value)) is None or (is_share and value > 1):
                what = "a share from 0 to 1" if is_share else "a number from 0"
                raise ArgumentError(f"{field.name} must be {what} (got {quote(value)})")
        if not self.tensor_efficiency:
            raise ArgumentError("tensor_efficiency must be above 0 (got 0); 1 is ideal")


def project(
    layers: Sequence[Piece],
    cluster: Cluster,
    degrees: Degrees,
    *,
    microbatches: int,
    tokens_per_microbatch: float = 0.0,
    flops_per_token: float = 0.0,
    stages_per_rank: int = 1,
    assumptions: Assumptions | None = None,
    seconds: float = 0.0,
) -> Projection:
    """Project a model to a cluster, from the costs of its layers on one device.

    `microbatches` are those of a step over all replicas. The order is the fastest family that
    fits; with `seconds`, the planner looks for a better one that long.

    >>> block = Piece("block", forward=1, backward_input=1, backward_weight=1, gradient_bytes=4e9)
    >>> cluster = Cluster(nodes=4, devices_per_node=2, bandwidth_inside=100e9,
    ...     bandwidth_between=10e9)
    >>> found = project([block] * 8, cluster, Degrees(2, 2, 2), microbatches=16)
    >>> round(found.seconds, 3), {name: round(s, 3) for name, s in found.by_cause.items() if s}
    (50.8, {'work': 48.0, 'bubble': 2.0, 'reduction': 0.8})
    """
    given = Assumptions() if assumptions is None else assumptions
    _check(layers, cluster, degrees, microbatches)
    pieces = [_divide(layer, cluster, degrees, given) for layer in layers]
    placement = Placement.loop(degrees.pipeline, stages_per_rank)
    cut = partition(pieces, placement)
    costs = cut.to_costs()
    size = max(float(np.max(costs.message_bytes)), 0.0)
    costs = replace(costs, transfer=_transfers(cluster, degrees, size))
    limit = None if isinf(cluster.memory) else cluster.memory
    problem = SchedulingProblem.of(costs, placement, microbatches // degrees.data, limit)
    plan = _find_order(problem, seconds)
    workload = Workload(
        tokens_per_microbatch, flops_per_token, cluster.peak_flops, degrees.tensor, degrees.data
    )
    return Projection(
        degrees=degrees,
        plan=plan,
        sizes=cut.sizes,
        collective_seconds=_collective_seconds(layers, cluster, degrees, given),
        reduction_seconds=_reduction_seconds(plan, cluster, degrees, given),
        optimizer_seconds=given.optimizer_seconds,
        workload=workload,
    )


def project_all(
    layers: Sequence[Piece],
    cluster: Cluster,
    *,
    microbatches: int,
    tokens_per_microbatch: float = 0.0,
    flops_per_token: float = 0.0,
    assumptions: Assumptions | None = None,
) -> tuple[Projection, ...]:
    """Project a model to a cluster in every way that fits, the fastest first."""
    found = []
    for degrees in degrees_for(cluster, layers=len(layers), microbatches=microbatches):
        try:
            one = project(
                layers,
                cluster,
                degrees,
                microbatches=microbatches,
                tokens_per_microbatch=tokens_per_microbatch,
                flops_per_token=flops_per_token,
                assumptions=assumptions,
            )
        except MemoryLimitError:
            continue
        found.append(one)
    if not found:
        raise MemoryLimitError(
            f"no way to use {cluster.devices} devices fits into {cluster.memory:,.0f} bytes each; "
            "use more nodes, smaller microbatches, or a number of microbatches that replicas share"
        )
    return tuple(sorted(found, key=lambda one: one.seconds))


def _check(layers: Sequence[Piece], cluster: Cluster, degrees: Degrees, microbatches: int) -> None:
    if degrees.devices != cluster.devices:
        raise SizeError(
            f"the degrees must use all devices (devices: {cluster.devices}, {degrees} use "
            f"{degrees.devices})"
        )
    if microbatches < 1 or microbatches % degrees.data:
        raise SizeError(
            f"replicas must get equal numbers of microbatches (microbatches: {microbatches}, "
            f"replicas: {degrees.data}); use a multiple of {degrees.data}"
        )
    if len(layers) < degrees.pipeline:
        raise SizeError(
            f"every rank needs a layer (layers: {len(layers)}, ranks: {degrees.pipeline})"
        )


def _divide(layer: Piece, cluster: Cluster, degrees: Degrees, given: Assumptions) -> Piece:
    """Return what a layer costs each of the devices that share it."""
    tensor = degrees.tensor
    efficiency = given.tensor_efficiency if tensor > 1 else 1.0
    faster = tensor * efficiency * cluster.speed
    collectives = _layer_collectives(layer, cluster, degrees, given)
    shards = degrees.data if given.shard_optimizer else 1
    return replace(
        layer,
        forward=layer.forward / faster + collectives,
        backward_input=layer.backward_input / faster + collectives,
        backward_weight=layer.backward_weight / faster,
        parameter_bytes=layer.parameter_bytes / tensor,
        gradient_bytes=layer.gradient_bytes / tensor,
        optimizer_bytes=layer.optimizer_bytes / tensor / shards,
        activation_bytes=layer.activation_bytes / tensor,
        weight_stash_bytes=layer.weight_stash_bytes / tensor,
        message_bytes=layer.message_bytes / tensor,
        workspace_bytes=layer.workspace_bytes / tensor,
    )


def _layer_collectives(
    layer: Piece, cluster: Cluster, degrees: Degrees, given: Assumptions
) -> float:
    """Return the seconds of a layer's all-reduces in F (and in I) that nothing hides."""
    if degrees.tensor == 1:
        return 0.0
    one = cluster.all_reduce_seconds(
        layer.message_bytes, devices=degrees.tensor, is_inside=degrees.is_tensor_inside(cluster)
    )
    return given.tensor_reductions * one * (1 - given.tensor_overlap)


def _collective_seconds(
    layers: Sequence[Piece], cluster: Cluster, degrees: Degrees, given: Assumptions
) -> float:
    """Return the seconds per microbatch, F and I, of all layers on an average rank."""
    whole = sum(_layer_collectives(layer, cluster, degrees, given) for layer in layers)
    return 2 * whole / degrees.pipeline


def _transfers(cluster: Cluster, degrees: Degrees, size: float) -> list[list[float]]:
    """Return the seconds of a message of `size` bytes from every rank to every rank."""
    ranks = range(degrees.pipeline)
    return [
        [
            0.0
            if sender == receiver
            else cluster.message_seconds(
                size, is_inside=degrees.is_link_inside(cluster, sender, receiver)
            )
            for receiver in ranks
        ]
        for sender in ranks
    ]


def _find_order(problem: SchedulingProblem, seconds: float) -> Plan:
    """Return the fastest family that fits, or what the planner finds."""
    bound = lower_bound(problem)
    plans = [Plan(problem, schedule, bound) for schedule in fixed_schedules(problem)]
    fitting = [plan for plan in plans if plan.keeps_limit]
    if seconds > 0 or not fitting:
        fitting.append(solve(problem, seconds=seconds or 1.0))
    return min(fitting, key=lambda plan: plan.seconds)


def _reduction_seconds(
    plan: Plan, cluster: Cluster, degrees: Degrees, given: Assumptions
) -> tuple[float, ...]:
    """Return, per rank, the seconds of reducing its gradients that no compute hides."""
    if degrees.data == 1:
        return (0.0,) * degrees.pipeline
    problem = plan.problem
    sizes = problem.costs.per_stage("gradient_bytes", problem.stages)
    holder = np.array(problem.placement.rank_of_stage)
    per_rank = np.bincount(holder, sizes, problem.ranks)
    return tuple(
        cluster.all_reduce_seconds(
            float(size), devices=degrees.data, is_inside=degrees.is_data_inside(cluster)
        )
        * (1 - given.data_overlap)
        for size in per_rank
    )
