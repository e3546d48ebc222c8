"""ZBV: zero bubble over two stages per rank in a V. https://arxiv.org/abs/2401.10241

Each rank holds a stage on the way down (0) and one on the way up (1), so that the first backward
starts where the last forward ended, and memory is the same on every rank.
"""

from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import assemble, phases
from penstock.schedules.sizes import require_stages_per_rank

__all__ = ["zbv"]


def zbv(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Follow the fixed V order: the activations of 1F1B, and ranks without gaps at equal costs."""
    require_stages_per_rank("ZBV", stages_per_rank, 2, instead="InterleavedZeroBubble")
    placement = Placement.v(ranks)
    # With fewer microbatches than fill the V, the order is that of a full one, thinned out.
    full = max(2 * ranks - 1, microbatches)
    orders = []
    for rank in range(ranks):
        hops = ranks - rank
        steps = [
            (2 * hops - 1, "F0"),
            (rank, "F1 F0"),
            (hops, "F1 I1 W1"),
            (full - 2 * ranks + rank + 1, "F0 I0 W0 F1 I1 W1"),
            (hops - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (hops, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        orders.append(phases(placement.stages(rank), steps, range(microbatches)))
    return assemble("ZBV", orders, placement, microbatches)
