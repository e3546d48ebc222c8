"""1F1B: a backward as soon as it can run. https://arxiv.org/abs/1806.03377

rank 0   F0 F1 F2       B0 F3 B1    B2    B3
rank 1      F0 F1    B0 F2 B1 F3 B2    B3
rank 2         F0 B0 F1 B1 F2 B2 F3 B3
"""

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import assemble, phases
from penstock.schedules.sizes import require_stages_per_rank

__all__ = ["one_f_one_b"]


def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Run each rank ahead by its distance from the last one, then alternate F and B."""
    require_stages_per_rank("1F1B", stages_per_rank, 1, instead="Interleaved1F1B")
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        steps = [(ahead, "F0"), (microbatches - ahead, "F0 B0"), (ahead, "B0")]
        orders.append(phases([rank], steps, range(microbatches)))
    return assemble("1F1B", orders, Placement.loop(ranks), microbatches)
