"""Looped breadth-first: GPipe over several stages per rank. https://arxiv.org/abs/2211.05953

rank 0   0F0 0F1 2F0 2F1         2B1 2B0 0B1 0B0
rank 1       1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
"""

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import assemble, join, sweep

__all__ = ["looped_bfs"]


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run all microbatches through one stage before the next; backwards retrace every step."""
    placement = Placement.loop(ranks, stages_per_rank)
    there, back = range(microbatches), range(microbatches - 1, -1, -1)
    orders = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        forwards = [sweep(Kind.FORWARD, stage, there) for stage in stages]
        backwards = [sweep(Kind.FULL_BACKWARD, stage, back) for stage in reversed(stages)]
        orders.append(join(forwards + backwards))
    return assemble("LoopedBFS", orders, placement, microbatches)
