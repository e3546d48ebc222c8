"""Forward passes only, for evaluation.

rank 0   F0 F1 F2 F3
rank 1      F0 F1 F2 F3
"""

from penstock.ir.actions import Kind
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import assemble, join, sweep

__all__ = ["forward_only", "forward_only_on"]


def forward_only(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Run every microbatch forward through every stage, one stage of a rank after the other."""
    placement = Placement.loop(ranks, stages_per_rank)
    return forward_only_on(placement, Dataflow.chain(placement.num_stages), microbatches)


def forward_only_on(placement: Placement, dataflow: Dataflow, microbatches: int) -> Schedule:
    """Return forward passes for any placement, such as that of a training schedule.

    Copies of the model divide the microbatches among them.
    """
    copies = max(dataflow.stream_of_stage) + 1
    bounds = [microbatches * copy // copies for copy in range(copies + 1)]
    orders = []
    for rank in range(placement.num_ranks):
        sweeps = []
        for stage in placement.stages(rank):
            copy = dataflow.stream_of_stage[stage]
            sweeps.append(sweep(Kind.FORWARD, stage, range(bounds[copy], bounds[copy + 1])))
        orders.append(join(sweeps))
    return assemble("ForwardOnly", orders, placement, microbatches, dataflow)
