"""DualPipe and DualPipeV: forwards of one half overlapped with backwards of the other.

https://arxiv.org/abs/2412.19437. A rank has two stages, one near the entry of the pipe (0) and one
near its exit (1). Eight phases, with the names that the authors gave them:

    1  F0          run ahead                    5  B1 (F1 B0)   no more fresh microbatches
    2  F0 F1       the turn comes back          6  B1 B0        drain; the second half only I
    3  I1 W1 F1    first backwards              7  W I0         weight work fills the gaps
    4  (F0 B1) (F1 B0)   the steady state       8  W            what is left of it

DualPipeV folds one pipe into a V. DualPipe sends microbatches into two copies of the model from
both ends; seen from the nearer end, each half of the ranks is such a V.
"""

from penstock.errors import SizeError
from penstock.ir.dataflow import Dataflow
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.moves import Moves, assemble, phases
from penstock.schedules.sizes import require_stages_per_rank

__all__ = ["dualpipe", "dualpipe_v"]


def dualpipe_v(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Fold one pipe into a V, and overlap forwards and backwards."""
    require_stages_per_rank("DualPipeV", stages_per_rank, 2)
    placement = Placement.v(ranks)
    orders = [
        _order(ranks, rank, placement.stages(rank), (range(microbatches),) * 2)
        for rank in range(ranks)
    ]
    return assemble("DualPipeV", orders, placement, microbatches)


def dualpipe(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Feed two copies of the model from both ends; each takes half of the microbatches."""
    require_stages_per_rank("DualPipe", stages_per_rank, 2)
    if ranks % 2:
        raise SizeError(
            f"DualPipe needs an even number of ranks (ranks: {ranks}); "
            f"use {max(2, ranks - 1)} or {ranks + 1}, or DualPipeV"
        )
    if microbatches < 2:
        raise SizeError("DualPipe feeds both ends (microbatches: 1); use 2 or more, or DualPipeV")
    placement = Placement.v(ranks)
    middle = (microbatches + 1) // 2
    from_start, from_end = range(middle), range(middle, microbatches)
    orders = []
    for rank in range(ranks):
        down, up = placement.stages(rank)
        depth = min(rank, ranks - 1 - rank)
        if depth == rank:
            orders.append(_order(ranks // 2, depth, (down, up), (from_start, from_end)))
        else:
            orders.append(_order(ranks // 2, depth, (up, down), (from_end, from_start)))
    return assemble("DualPipe", orders, placement, microbatches, Dataflow.copies(ranks, 2))


def _order(depths: int, depth: int, stages: tuple[int, ...], shares: tuple[range, range]) -> Moves:
    """Return the order of the rank at `depth` in a V that turns at the last of `depths`."""
    # With fewer microbatches than fill the V, the order is that of a full one, thinned out.
    microbatches = max(2 * depths, *map(len, shares))
    below, above = depths - 1 - depth, depth + 1
    steady = microbatches - 2 * depths + above
    is_turn = depth == depths - 1
    # The drain is 2 * above backwards, B1 and B0 in turn; from the middle on W is deferred.
    drain = ["B1", "B0"] * above
    drain[above:] = [move.replace("B", "I") for move in drain[above:]]
    put_off = [move.replace("I", "W") for move in drain[above:]] + ["W0"] * below
    fill = [move for weight in put_off[:below] for move in (weight, "I0")] + put_off[below:]
    steps = [
        (2 * below, "F0"),
        (above, "F0 F1"),
        (below, "I1 W1 F1"),
        # At the turn both halves of the first pair are ready at once: an overlap would wait.
        (1 if is_turn else 0, "F0 B1 (F1 B0)"),
        (steady - is_turn, "(F0 B1) (F1 B0)"),
        (below, "B1 (F1 B0)"),
        (1, " ".join(drain)),
        (1, " ".join(fill)),
    ]
    return phases(stages, steps, *shares)
