"""ZB-H1 and ZB-H2: the weight half of the backward fills the bubble.

    ZB-H1, rank 0   F0 F1          I0 W0 F2 I1 W1 ...     https://arxiv.org/abs/2401.10241
           rank 1      F0 I0 F1 I1 W0 F2 I2 W1 ...

H1 holds as many activations as 1F1B. H2 runs almost twice as far ahead, and puts off twice as
much weight work, so that the steady state begins without a gap.
"""

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import Moves, alternate, assemble, join, sweep
from penstock.schedules.sizes import require_stages_per_rank

__all__ = ["weave", "zero_bubble_h1", "zero_bubble_h2"]


def zero_bubble_h1(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Run 1F1B with deferred weight work: a third of its idle time at equal costs."""
    require_stages_per_rank("ZB-H1", stages_per_rank, 1, instead="InterleavedZeroBubble")
    return _handcrafted("ZB-H1", ranks, microbatches, depth=1)


def zero_bubble_h2(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Start with up to 2 * ranks - 1 forwards, so that ranks have no gaps at equal costs."""
    require_stages_per_rank("ZB-H2", stages_per_rank, 1, instead="ZBV")
    return _handcrafted("ZB-H2", ranks, microbatches, depth=2)


def _handcrafted(name: str, ranks: int, microbatches: int, *, depth: int) -> Schedule:
    """Let each rank run ahead, and defer weight work, by `depth` microbatches per hop."""
    orders = []
    for rank in range(ranks):
        forwards, inputs, weights = (
            sweep(kind, rank, range(microbatches))
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        ahead = depth * (ranks - 1 - rank)
        orders.append(weave(forwards, inputs, weights, ahead=ahead, delay=depth * rank))
    return assemble(name, orders, Placement.loop(ranks), microbatches)


def weave(forwards: Moves, inputs: Moves, weights: Moves, *, ahead: int, delay: int) -> Moves:
    """Return `ahead` forwards, then F and I in turn, with W from turn `delay` on."""
    rest = forwards[ahead:]
    first = alternate(rest[:delay], inputs[:delay])
    then = alternate(rest[delay:], inputs[delay:], weights[: max(0, len(inputs) - delay)])
    return join([forwards[:ahead], first, then, weights[max(0, len(inputs) - delay) :]])
