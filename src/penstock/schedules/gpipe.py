"""GPipe: all forwards, then all backwards. https://arxiv.org/abs/1811.06965

rank 0   F0 F1 F2 F3          B0 B1 B2 B3
rank 1      F0 F1 F2 F3 B0 B1 B2 B3
"""

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import assemble, phases
from penstock.schedules.sizes import require_stages_per_rank

__all__ = ["gpipe"]


def gpipe(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Run all forwards, then all backwards, each in the order of the microbatches."""
    require_stages_per_rank("GPipe", stages_per_rank, 1, instead="LoopedBFS")
    order = [(microbatches, "F0"), (microbatches, "B0")]
    orders = [phases([rank], order, range(microbatches)) for rank in range(ranks)]
    return assemble("GPipe", orders, Placement.loop(ranks), microbatches)
