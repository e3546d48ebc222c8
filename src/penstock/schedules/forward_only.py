"""Forward passes only, for evaluation.

rank 0   F0 F1 F2 F3
rank 1      F0 F1 F2 F3
"""

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import assemble, join, sweep

__all__ = ["forward_only"]


def forward_only(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Every microbatch forward through every stage, a rank's stages in turn."""
    placement = Placement.loop(ranks, stages_per_rank)
    orders = [
        join(sweep(Kind.FORWARD, stage, range(microbatches)) for stage in placement.stages(rank))
        for rank in range(ranks)
    ]
    return assemble("ForwardOnly", orders, placement, microbatches)
