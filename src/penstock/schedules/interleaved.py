"""Interleaved 1F1B: several stages per rank, in rounds. https://arxiv.org/abs/2104.04473

Microbatches go in rounds of about as many as there are ranks. Within a round a rank runs its
first stage for all of them, then its second, and so on; backwards in the opposite order of stages.

    2 ranks, 4 stages, 4 microbatches, forwards of rank 0:  0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3
"""

from penstock.ir.actions import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import Moves, alternate, assemble, join, sweep
from penstock.schedules.zero_bubble import weave

__all__ = ["interleaved_one_f_one_b", "interleaved_zero_bubble"]


def interleaved_one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run 1F1B over several stages per rank, for any number of microbatches."""
    placement = Placement.loop(ranks, stages_per_rank)
    rounds = _rounds(ranks, microbatches)
    orders = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        forwards = _in_rounds(Kind.FORWARD, stages, rounds)
        backwards = _in_rounds(Kind.FULL_BACKWARD, stages[::-1], rounds)
        ahead = (stages_per_rank - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank)
        orders.append(join([forwards[:ahead], alternate(forwards[ahead:], backwards)]))
    return assemble("Interleaved1F1B", orders, placement, microbatches)


def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Run interleaved 1F1B with the backward split: later ranks defer more of the weight work.

    With one stage per rank it is ZB-H1 of https://arxiv.org/abs/2401.10241.
    """
    placement = Placement.loop(ranks, stages_per_rank)
    rounds = _rounds(ranks, microbatches)
    orders = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        forwards = _in_rounds(Kind.FORWARD, stages, rounds)
        inputs = _in_rounds(Kind.BACKWARD_INPUT, stages[::-1], rounds)
        weights = _in_rounds(Kind.BACKWARD_WEIGHT, stages[::-1], rounds)
        ahead = (stages_per_rank - 1) * len(rounds[0]) + (ranks - 1 - rank)
        orders.append(weave(forwards, inputs, weights, ahead=ahead, delay=rank))
    return assemble("InterleavedZeroBubble", orders, placement, microbatches)


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Return the microbatches in rounds of at least `ranks`, the larger rounds first."""
    number = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, number)
    ends = [size * (index + 1) + min(index + 1, larger) for index in range(number)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _in_rounds(kind: Kind, stages: tuple[int, ...], rounds: list[range]) -> Moves:
    return join(sweep(kind, stage, microbatches) for microbatches in rounds for stage in stages)
