"""The bytes that each rank holds, all the time and while a schedule runs."""

import numpy as np

from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule

__all__ = ["byte_changes", "held_bytes", "resident_bytes"]


def held_bytes(schedule: Schedule, costs: Costs) -> Floats:
    """Return, per row, the bytes that its rank holds then.

    A forward adds its activations when it starts; a backward frees them when it ends, less
    what the weight backward still needs. If they are recomputed, the forward adds only its
    inputs, and RECOMPUTE the rest when it starts. OFFLOAD frees them when it ends, and RELOAD
    takes them again when it starts. Parameters count while they are whole: between UNSHARD
    and RESHARD where a stage has them, else always. The rest is there all the time.
    """
    rows, stages = schedule.rows, schedule.num_stages
    changes = byte_changes(costs, stages)[rows.kind, rows.stage]
    if rows.has_memory_actions:
        again = rows.saves_inputs_only()
        changes[again] = costs.saved_input_bytes(stages)[rows.stage[again]]
    if not costs.is_unscaled:
        changes = changes * np.append(costs.scales(schedule.microbatches), 1.0)[rows.microbatch]
    total = np.cumsum(changes)
    before = np.concatenate(([0.0], total))[rows.first[:-1]]
    base = resident_bytes(costs, schedule.placement, schedule.dataflow)
    base = base - _sharded_bytes(schedule, costs.per_stage("parameter_bytes", stages))
    held = total + np.repeat(base - before, np.diff(rows.first))
    # What rounding leaves over of the sums may be below 0.
    return np.maximum(held, 0.0)


def byte_changes(costs: Costs, stages: int) -> Floats:
    """Return, by kind and stage, the bytes that an action takes; negative if it frees some.

    These are bytes of a microbatch of size 1.
    """
    activation = costs.per_stage("activation_bytes", stages)
    stash = costs.per_stage("weight_stash_bytes", stages)
    parameters = costs.per_stage("parameter_bytes", stages)
    change = np.zeros((len(Kind), stages))
    change[Kind.FORWARD] = activation
    change[Kind.FULL_BACKWARD] = -activation
    change[Kind.BACKWARD_INPUT] = stash - activation
    change[Kind.BACKWARD_WEIGHT] = -stash
    change[Kind.RECOMPUTE] = activation - costs.saved_input_bytes(stages)
    change[Kind.OFFLOAD] = -activation
    change[Kind.RELOAD] = activation
    change[Kind.UNSHARD] = parameters
    change[Kind.RESHARD] = -parameters
    return change


def _sharded_bytes(schedule: Schedule, parameters: Floats) -> Floats:
    """Return, per rank, the bytes of parameters that are sharded outside UNSHARD .. RESHARD."""
    rows = schedule.rows
    is_sharded = np.zeros(schedule.num_stages, dtype=np.bool_)
    is_sharded[rows.stage[rows.is_kind(Kind.UNSHARD)]] = True
    return _per_rank(schedule.placement, np.where(is_sharded, parameters, 0.0))


def resident_bytes(costs: Costs, placement: Placement, dataflow: Dataflow) -> Floats:
    """Return, per rank, the bytes that it holds all the time.

    These are whole parameters, gradients, optimizer state, a buffer for one message of each kind
    that a stage receives, and the largest workspace; messages and workspaces are those of the
    largest microbatch.
    """
    stages, holder = placement.num_stages, placement.rank_of_stage
    held = sum(
        costs.per_stage(f"{kind}_bytes", stages) for kind in ("parameter", "gradient", "optimizer")
    )
    message = costs.per_stage("message_bytes", stages) * np.max(costs.microbatch_scale)
    inputs, gradients = np.zeros(stages), np.zeros(stages)
    for producer, consumer in dataflow.edges:
        if holder[producer] != holder[consumer]:
            inputs[consumer] = message[consumer]
            gradients[producer] += message[consumer]
    return _per_rank(placement, held + inputs + gradients) + _largest_workspace(costs, placement)


def _largest_workspace(costs: Costs, placement: Placement) -> Floats:
    largest = np.zeros(placement.num_ranks)
    workspace = costs.per_stage("workspace_bytes", placement.num_stages)
    np.maximum.at(largest, np.array(placement.rank_of_stage), workspace)
    scaled: Floats = largest * np.max(costs.microbatch_scale)
    return scaled


def _per_rank(placement: Placement, per_stage: Floats) -> Floats:
    holder = np.array(placement.rank_of_stage)
    return np.bincount(holder, per_stage, placement.num_ranks).astype(np.float64)
