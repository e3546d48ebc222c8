"""How many bytes each rank holds while a schedule runs."""

import numpy as np
from numpy.typing import NDArray

from penstock.costs import Costs
from penstock.ir.actions import Kind
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule

__all__ = ["held_bytes"]


def held_bytes(schedule: Schedule, costs: Costs) -> Floats:
    """The bytes that a row's rank holds because of it, in its place in the rank's order.

    A forward adds its activations when it starts; a backward gives them back when it ends, less
    what the weight backward still needs. Parameters count while they are whole: between UNSHARD
    and RESHARD where a stage has them, else always.
    """
    rows, stages = schedule.rows, schedule.num_stages
    total = np.cumsum(_changes(costs, stages)[rows.kind, rows.stage])
    before = np.concatenate(([0.0], total))[rows.first[:-1]]
    base = _always_whole(schedule, costs.per_stage("parameter_bytes", stages))
    return total + np.repeat(base - before, np.diff(rows.first))


def _changes(costs: Costs, stages: int) -> Floats:
    activation = costs.per_stage("activation_bytes", stages)
    stash = costs.per_stage("weight_stash_bytes", stages)
    parameters = costs.per_stage("parameter_bytes", stages)
    change = np.zeros((len(Kind), stages))
    change[Kind.FORWARD] = activation
    change[Kind.FULL_BACKWARD] = -activation
    change[Kind.BACKWARD_INPUT] = stash - activation
    change[Kind.BACKWARD_WEIGHT] = -stash
    change[Kind.UNSHARD] = parameters
    change[Kind.RESHARD] = -parameters
    return change


def _always_whole(schedule: Schedule, parameters: Floats) -> NDArray[np.float64]:
    """Per rank, the bytes of the stages that are never sharded."""
    rows = schedule.rows
    is_sharded = np.zeros(schedule.num_stages, dtype=np.bool_)
    is_sharded[rows.stage[rows.is_kind(Kind.UNSHARD)]] = True
    whole = np.where(is_sharded, 0.0, parameters)
    holder = np.array(schedule.placement.rank_of_stage)
    return np.bincount(holder, weights=whole, minlength=schedule.num_ranks).astype(np.float64)
